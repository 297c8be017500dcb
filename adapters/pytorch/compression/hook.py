"""The second kind of compression: a hook that reduces gradients by operations of its own.

A sum of int8 overflows, the largest entries of two ranks are different ones, and low-rank
factors need two rounds: `Compressor` can say none of this. A hook is a generator that starts
operations on a `Wire`, yields what it waits for, and is resumed with the result. Whoever
drives it (`exchange`) has gathered gradients in one flat tensor, and puts the result back.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch

from hvdlite.lowlevel import Handle

Shapes = Sequence[tuple[int, ...]]
Steps = Generator[Handle, Any, tuple[torch.Tensor, Any]]


class Wire(Protocol):
    """What a hook may do: start operations of all ranks of a set, which need no names.

    Every rank must start the same ones in the same order.

    Attributes:
        size: of the set.
        rank: of this process within the set.
        factor: what the sum over the ranks is to be multiplied by: 1/size for an average.
    """

    size: int
    rank: int
    factor: float

    def allreduce(self, tensor: torch.Tensor, scale: float = 1.0, last: bool = False) -> Handle:
        """Start to add `tensor` up over the ranks, in place, and to multiply the sum by `scale`.

        Args:
            last: no other operation follows. A rank that fails before the last one has started tells the others.
        """

    def allgather(self, tensor: torch.Tensor, last: bool = False) -> Handle:
        """Start to collect the rows of all ranks, in rank order. Ranks that have joined have none."""

    def alltoall(self, tensor: torch.Tensor, last: bool = False) -> Handle:
        """Start to send the i-th part of the rows of `tensor` to the i-th rank. The result is (rows, rows by rank)."""


class CommHook:
    """How the gradients of some parameters become those of all ranks: base of `Int8`, `TopK`, `PowerSGD` and your own.

    An instance holds settings only, and is shared by all parameters: what is kept from step to step travels through
    `reduce` as `memory`. Instances on two ranks are the same if their `repr` is.
    """

    def order(self, shapes: Shapes) -> list[int]:
        """Return in which order tensors of these shapes lie in the flat one. As they come, unless overridden."""
        return list(range(len(shapes)))

    def length(self, n: int, size: int) -> int:
        """Return how many elements the flat tensor is to have for n elements of gradients; the rest is 0."""
        return n

    def remember(self, name: str, shapes: Shapes, dtype: torch.dtype, size: int) -> Any:
        """Return the `memory` of the first step.

        Args:
            name: of the batch: the same on all ranks, another one for each batch.
            shapes: in the order in which the tensors lie.
            dtype: of the flat tensor: float32, or float64.
            size: number of ranks.
        """
        return None

    def reduce(self, flat: torch.Tensor, memory: Any, wire: Wire) -> Steps:
        """Start an operation on `wire`, yield it, get its result; and so on.

        Args:
            flat: this rank's gradients, and what it has held back; never empty. What it sends is to be subtracted from
                it, in place: the rest is added to the gradients of the next step.
            memory: must not be changed: this step may fail, or turn out not to be finite, and then does not count.

        Returns:
            The sum over the ranks of what they sent, multiplied by `wire.factor`, like `flat` (and not `flat` itself):
            the same bits on every rank. And the memory of the next step.
        """
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))
