"""MPI's own collectives: the yardstick, and a fallback where ours misbehave.

Steps and bytes are the MPI library's choice. What MPI cannot reduce as the contract says (half types,
Min and Max of floats, where it leaves NaN open, short integers, Adasum) goes through the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.collectives.base import Array, Backend
from hvdlite.collectives.pack import Scratch, as_bytes, concatenate, distribute, offsets, total_length
from hvdlite.collectives.ring import CHUNK_BYTES, RingBackend
from hvdlite.comm.base import Communicator
from hvdlite.dtypes import SUPPORTED, ReduceOp
from hvdlite.kernels import NO_FINISH, Finish, Kernels
from hvdlite.messages import Knobs


class MpiNativeBackend(Backend):
    """Any number of ranks whose communicator has `native` collectives.

    Args:
        chunk_bytes: for what goes through the ring.
    """

    name = "mpi_native"

    def __init__(self, comm: Communicator, kernels: Kernels, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(comm, kernels)
        self._native: Any = comm.native
        if self._native is None:
            raise ValueError("mpi_native needs a communicator over MPI; this one has no native collectives.")
        self._scratch = Scratch()
        self._ring = RingBackend(comm, kernels, chunk_bytes)

    def allreduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        if total_length(sources) == 0:
            return
        if not self._can_reduce(sources, op):
            self._ring.allreduce(sources, targets, op, prescale, finish)
            return
        single = len(sources) == 1
        fused = targets[0] if single else self._scratch.take("fused", sources[0].dtype, total_length(sources))
        if not single:
            concatenate(sources, fused)
        elif sources[0] is not fused:
            np.copyto(fused, sources[0])
        self.kernels.scale(fused, fused, prescale)
        self._native.allreduce(fused, op)
        self.kernels.finish(fused, finish)
        if not single:
            distribute(fused, targets)

    def reducescatter(
        self,
        sources: Sequence[Array],
        counts: Sequence[Sequence[int]],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        if total_length(sources) == 0:
            return
        if not self._can_reduce(sources, op):
            self._ring.reducescatter(sources, counts, targets, op, prescale, finish)
            return
        for source, count, target in zip(sources, counts, targets, strict=True):
            outgoing = source
            if prescale != 1.0:
                outgoing = self._scratch.take("fused", source.dtype, source.size)
                self.kernels.scale(source, outgoing, prescale)
            self._native.reducescatter(outgoing, count, target, op)
            self.kernels.finish(target, finish)

    def allgather(self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]) -> None:
        if len(sources) == 1:
            self._native.allgather(sources[0], counts[0], targets[0])
            return
        size = self.comm.size
        raw_targets = [as_bytes(target) for target in targets]
        starts = [offsets([c * s.itemsize for c in count]) for count, s in zip(counts, sources, strict=True)]
        lengths = [sum(start[r + 1] - start[r] for start in starts) for r in range(size)]
        mine = self._scratch.take("mine", SUPPORTED["uint8"], lengths[self.comm.rank])
        fused = self._scratch.take("fused", SUPPORTED["uint8"], sum(lengths))
        concatenate([as_bytes(source) for source in sources], mine)
        self._native.allgather(mine, lengths, fused)
        bounds = offsets(lengths)
        for r in range(size):
            places = [raw[s[r] : s[r + 1]] for raw, s in zip(raw_targets, starts, strict=True)]
            distribute(fused[bounds[r] : bounds[r + 1]], places)

    def broadcast(self, array: Array, root: int) -> None:
        self._native.broadcast(array, root)

    def alltoall(self, source: Array, send: Sequence[int], target: Array, receive: Sequence[int]) -> None:
        self._native.alltoall(source[: sum(send)], send, target, receive)

    def tune(self, knobs: Knobs) -> None:
        self._ring.tune(knobs)

    def close(self) -> None:
        self._scratch.clear()
        self._ring.close()

    def _can_reduce(self, sources: Sequence[Array], op: ReduceOp) -> bool:
        return op is not ReduceOp.ADASUM and bool(self._native.supports(sources[0].dtype, op))
