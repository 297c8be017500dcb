"""Small messages between any ranks: fewest steps.

                          steps         bytes sent per rank
    allreduce, tiny       1             S (P - 1)          everybody to everybody, for few ranks
    allreduce             log2(P) [+ 2] S log2(P)          recursive doubling
    reducescatter         the same, of which each rank keeps its piece
    broadcast             log2(P)       at most S log2(P)  binomial tree
    allgather, alltoall   P - 1         as the ring's: what a rank gets from each other differs anyway

P = ranks, S = buffer bytes; two more steps when P is not a power of two. Half types travel as float32.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.collectives.adasum import Adasum
from hvdlite.collectives.base import Array, Backend
from hvdlite.collectives.pack import Scratch, offsets, total_length
from hvdlite.collectives.ring import CHUNK_BYTES, RingBackend
from hvdlite.collectives.schedules import binomial_parent_and_children, doubling_steps
from hvdlite.comm.base import Communicator
from hvdlite.dtypes import ReduceOp, accumulator, is_half
from hvdlite.kernels import NO_FINISH, Finish, Kernels
from hvdlite.messages import Knobs

# Up to here a rank sends its values to all others at once: a trip through the network (20 us to 1 ms) costs more than
# the 5 us that a message more does.
_TINY_BYTES, _FEW_RANKS = 4096, 8


def is_tiny(length: int, dtype: np.dtype[Any], size: int) -> bool:
    """Return whether an allreduce among `size` ranks is one trip, from everybody to everybody, summed in rank order."""
    return 1 < size <= _FEW_RANKS and 0 < length * accumulator(dtype).itemsize <= _TINY_BYTES


class TreeBackend(Backend):
    """Any number of ranks, anywhere."""

    name = "tree"

    def __init__(self, comm: Communicator, kernels: Kernels, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(comm, kernels)
        self._scratch = Scratch()
        self._ring = RingBackend(comm, kernels, chunk_bytes)
        self._adasum = Adasum(comm, kernels)

    def allreduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        if op is ReduceOp.ADASUM:
            self._adasum.allreduce(sources, targets, prescale, finish)
        elif total_length(sources):
            self._store(self._reduce_all(sources, op, prescale, finish), targets)

    def reducescatter(
        self,
        sources: Sequence[Array],
        counts: Sequence[Sequence[int]],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        if not total_length(sources):
            return
        reduced = self._reduce_all(sources, op, prescale, finish)
        start = 0
        for source, count, target in zip(sources, counts, targets, strict=True):
            low = start + sum(count[: self.comm.rank])
            self._store(reduced[low : low + target.size], [target])
            start += source.size

    def allgather(self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]) -> None:
        self._ring.allgather(sources, counts, targets)

    def broadcast(self, array: Array, root: int) -> None:
        if array.size == 0:
            return
        parent, children = binomial_parent_and_children(self.comm.rank, self.comm.size, root)
        if parent is not None:
            self.comm.recv(array, parent)
        for transfer in [self.comm.isend(array, child) for child in children]:
            transfer.wait()

    def alltoall(self, source: Array, send: Sequence[int], target: Array, receive: Sequence[int]) -> None:
        self._ring.alltoall(source, send, target, receive)

    def tune(self, knobs: Knobs) -> None:
        self._ring.tune(knobs)

    def close(self) -> None:
        self._scratch.clear()
        self._ring.close()
        self._adasum.clear()

    def _reduce_all(self, sources: Sequence[Array], op: ReduceOp, prescale: float, finish: Finish) -> Array:
        """Return the reduced sources, one after the other, in the dtype of the accumulator."""
        wide = accumulator(sources[0].dtype)
        length = total_length(sources)
        mine = self._scratch.take("mine", wide, length)
        self._load(sources, mine)
        self.kernels.scale(mine, mine, prescale)
        if is_tiny(length, mine.dtype, self.comm.size):
            self._exchange(mine, op)
        else:
            self._double(mine, op)
        self.kernels.finish(mine, finish)
        return mine

    def _exchange(self, mine: Array, op: ReduceOp) -> None:
        """Reduce `mine` in rank order on every rank, from what all have sent to all."""
        rank, size = self.comm.rank, self.comm.size
        everything = self._scratch.take("everything", mine.dtype, size * mine.size).reshape(size, mine.size)
        peers = [(rank + distance) % size for distance in range(1, size)]
        transfers = [self.comm.irecv(everything[peer], peer) for peer in peers]
        transfers += [self.comm.isend(mine, peer) for peer in peers]
        everything[rank] = mine
        for transfer in transfers:
            transfer.wait()
        self.kernels.reduce(op, list(everything), mine)

    def _double(self, mine: Array, op: ReduceOp) -> None:
        """Reduce `mine` by recursive doubling, in place."""
        theirs = self._scratch.take("theirs", mine.dtype, mine.size)
        rank = self.comm.rank
        for step in doubling_steps(rank, self.comm.size):
            if step.sends and step.receives:
                self.comm.sendrecv(mine, step.partner, theirs, step.partner)
            elif step.sends:
                self.comm.send(mine, step.partner)
            else:
                self.comm.recv(theirs if step.reduces else mine, step.partner)
            if step.reduces:
                # Lower ranks first on both sides, so that both get the same bits, NaN payloads included.
                self.kernels.combine(op, mine, theirs, other_first=step.partner < rank)

    def _load(self, sources: Sequence[Array], wide: Array) -> None:
        bounds = offsets([source.size for source in sources])
        for source, low, high in zip(sources, bounds, bounds[1:], strict=False):
            if is_half(source.dtype):
                self.kernels.widen(source, wide[low:high])
            else:
                np.copyto(wide[low:high], source)

    def _store(self, wide: Array, targets: Sequence[Array]) -> None:
        bounds = offsets([target.size for target in targets])
        for target, low, high in zip(targets, bounds, bounds[1:], strict=False):
            if is_half(target.dtype):
                self.kernels.narrow(wide[low:high], target)
            else:
                np.copyto(target, wide[low:high])
