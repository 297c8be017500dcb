"""The operations of one batch of gradients whose compression is a hook, under names of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdlite import ProcessSet
from hvdlite.lowlevel import Handle, ReduceOp

from .ops import Reduction, start_allgather, start_allreduce, start_alltoall
from .tensors import to_same


class NamedWire:
    """A `compression.Wire`.

    Args:
        name: of the batch; operations are called `<name>.1`, `<name>.2`.

    Attributes:
        done: the last operation has started, or failed to.
    """

    def __init__(self, name: str, process_set: ProcessSet, factor: float) -> None:
        size, rank = process_set.size(), process_set.rank()
        assert size is not None and rank is not None  # only members exchange
        self.size, self.rank, self.factor, self.done = size, rank, factor, False
        self._name, self._set, self._started = name, process_set, 0

    @property
    def next_name(self) -> str:
        """What the next operation will be called."""
        return f"{self._name}.{self._started + 1}"

    def allreduce(self, tensor: torch.Tensor, scale: float = 1.0, last: bool = False) -> Handle:
        reduction = Reduction(ReduceOp.SUM, 1.0, scale, self._set)
        return self._start(lambda names: start_allreduce([tensor], names, reduction, to_same)[0], last)

    def allgather(self, tensor: torch.Tensor, last: bool = False) -> Handle:
        return self._start(lambda names: start_allgather([tensor], names, self._set)[0], last)

    def alltoall(self, tensor: torch.Tensor, last: bool = False) -> Handle:
        return self._start(lambda names: start_alltoall(tensor, None, names[0], self._set), last)

    def _start(self, operation: Callable[[list[str]], Handle], last: bool) -> Handle:
        self.done = True  # also if this fails, which the other ranks hear of
        handle = operation([self.next_name])
        self.done = last
        self._started += 1
        handle.alert()  # the thread that trains has other things to do
        return handle
