"""The oracle of every test: everything goes to every rank, which reduces in rank order. Obvious, not fast.

    steps                  P                 P = ranks, S = bytes of a buffer
    bytes sent per rank    S (P - 1)
    scratch                S P

Its arithmetic is plain NumPy, not `Kernels`, so that the two check each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from hvdlite.collectives.adasum import adasum_tree
from hvdlite.collectives.base import Array, Backend
from hvdlite.collectives.pack import offsets
from hvdlite.dtypes import ReduceOp, accumulator, is_half, is_integer
from hvdlite.kernels import NO_FINISH, Finish, combiner


class ReferenceBackend(Backend):
    """Gathers with one exchange per pair of ranks."""

    name = "reference"

    def allreduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        for source, target in zip(sources, targets, strict=True):
            target[:] = reduce_in_rank_order(self._gather_equal(source), op, prescale, finish)

    def reducescatter(
        self,
        sources: Sequence[Array],
        counts: Sequence[Sequence[int]],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        for source, pieces, target in zip(sources, counts, targets, strict=True):
            start = sum(pieces[: self.comm.rank])
            everything = reduce_in_rank_order(self._gather_equal(source), op, prescale, finish)
            target[:] = everything[start : start + pieces[self.comm.rank]]

    def allgather(self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]) -> None:
        for source, lengths, target in zip(sources, counts, targets, strict=True):
            target[:] = np.concatenate(self._gather(source, lengths))

    def broadcast(self, array: Array, root: int) -> None:
        if self.comm.rank != root:
            self.comm.recv(array, root)
            return
        for rank in range(self.comm.size):
            if rank != root:
                self.comm.send(array, rank)

    def alltoall(self, source: Array, send: Sequence[int], target: Array, receive: Sequence[int]) -> None:
        leaving, arriving = offsets(send), offsets(receive)
        rank, size = self.comm.rank, self.comm.size
        for distance in range(size):
            to, by = (rank + distance) % size, (rank - distance) % size
            outgoing, incoming = source[leaving[to] : leaving[to + 1]], target[arriving[by] : arriving[by + 1]]
            if distance == 0:
                incoming[:] = outgoing
            else:
                self.comm.sendrecv(outgoing, to, incoming, by)

    def _gather_equal(self, source: Array) -> list[Array]:
        return self._gather(source, [source.size] * self.comm.size)

    def _gather(self, source: Array, lengths: Sequence[int]) -> list[Array]:
        """Return every rank's values in rank order."""
        rank, size = self.comm.rank, self.comm.size
        gathered = [np.empty(length, source.dtype) for length in lengths]
        gathered[rank][:] = source
        for distance in range(1, size):
            to, by = (rank + distance) % size, (rank - distance) % size
            self.comm.sendrecv(gathered[rank], to, gathered[by], by)
        return gathered


def reduce_in_rank_order(values: Sequence[Array], op: ReduceOp, prescale: float, finish: Finish) -> Array:
    """Return what every backend must agree with: `values`, one array per rank, as one."""
    dtype = values[0].dtype
    with np.errstate(all="ignore"):
        wide = [_scaled(value.astype(accumulator(dtype)), prescale) for value in values]
        total = adasum_tree(wide) if op is ReduceOp.ADASUM else reduce(combiner(op, dtype), wide)
        if finish.divisor != 1:
            total = _divided(total, finish.divisor)
        total = _scaled(total, finish.factor)
        return total if not is_half(dtype) else total.astype(dtype)


def _scaled(value: Array, factor: float) -> Array:
    if factor == 1.0:
        return value
    if is_integer(value.dtype) or value.dtype.kind == "b":
        return np.trunc(value.astype(np.float64) * factor).astype(value.dtype)
    if value.dtype.kind == "c":
        real: Any = value.view(value.real.dtype)
        return np.asarray((real * real.dtype.type(factor)).view(value.dtype))
    return np.asarray(value * value.dtype.type(factor))


def _divided(value: Array, divisor: int) -> Array:
    """Divide integers as C does. Python's own integers: exact at any width."""
    quotients = [abs(int(v)) // divisor * (-1 if v < 0 else 1) for v in value]
    return np.array(quotients, value.dtype)
