"""In which order do gradients become ready? Seen in the first round, and then agreed on: it is what one rank saw."""

from __future__ import annotations

import torch

from hvdlite import ProcessSet
from hvdlite.lowlevel import ReduceOp

from .ops import Reduction, start_allreduce
from .tensors import to_same


class ReadyOrder:
    """What one rank sees of `n` gradients, by number."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._seen: dict[int, None] = {}

    def note(self, number: int) -> None:
        """A gradient is ready. One that was ready already counts as of now."""
        self._seen.pop(number, None)
        self._seen[number] = None

    def agree(self, name: str, process_set: ProcessSet) -> list[int] | None:
        """Return all numbers in the order that the first rank of the set saw, unseen ones last. Collective.

        None, on all ranks alike, if that rank has joined, and so saw nothing.

        Args:
            name: under which it is asked.
        """
        unseen = [number for number in reversed(range(self._n)) if number not in self._seen]
        mine = torch.tensor([*self._seen, *unseen], dtype=torch.int64)
        if process_set.rank() != 0:
            mine.zero_()
        # A sum, for ranks that have joined take part in it, and add nothing.
        reduction = Reduction(ReduceOp.SUM, 1.0, 1.0, process_set)
        order: list[int] = start_allreduce([mine], [name], reduction, to_same)[0].wait().tolist()
        return order if sorted(order) == list(range(self._n)) else None
