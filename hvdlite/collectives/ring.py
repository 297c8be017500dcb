"""Large messages between any ranks: fewest bytes. AllReduce is reduce-scatter, then all-gather, around a ring.

                      steps       bytes sent per rank     scratch
    allreduce         2 (P - 1)   2 S (P - 1) / P         5 chunks (+ S when tensors are fused)
    reducescatter     P - 1       S (P - 1) / P           2 (P - 1) chunks
    allgather         P - 1       total - own             0 (+ total when tensors are fused)
    broadcast         P - 1       S                       0
    alltoall          P - 1       what is sent            0

P = ranks, S = buffer bytes. Steps are cut into chunks: while one is reduced, the next ones are under way, in both
directions of the link.

Half types must be rounded once, so no partial sum may travel as a half: each rank gets its slice
from all others, adds them in rank order in float32, and the rounded slices go around the ring. That
sends as many bytes as the ring does. Reducescatter works this way for all types.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hvdlite.collectives.adasum import Adasum
from hvdlite.collectives.base import Array, Backend
from hvdlite.collectives.pack import Scratch, as_bytes, concatenate, distribute, offsets, total_length
from hvdlite.collectives.schedules import RingStep, chunks, gather_steps, ring_steps, split_evenly
from hvdlite.comm.base import Communicator, Transfer
from hvdlite.dtypes import SUPPORTED, ReduceOp, is_half
from hvdlite.kernels import NO_FINISH, Finish, Kernels
from hvdlite.messages import Knobs

# Below Open MPI's eager limit for TCP, 64 KiB: larger messages are asked for first, in a way that leaves one direction
# of the link idle (1 Gbit/s, four hosts: 94 % of the link's rate with 60 KiB, 58 to 85 % with 128).
CHUNK_BYTES = 60 * 1024
_AHEAD = 4  # chunks under way in each direction: the link stays busy while this rank reduces, naps or asks to receive

_LEAST_CHUNK = 64  # bytes


class RingBackend(Backend):
    """Any number of ranks, anywhere.

    Args:
        chunk_bytes: largest transfer. Equal on all ranks.
    """

    name = "ring"

    def __init__(self, comm: Communicator, kernels: Kernels, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(comm, kernels)
        self._chunk_bytes = max(chunk_bytes, _LEAST_CHUNK)
        self._scratch = Scratch()
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
            return
        length = total_length(sources)
        if length == 0:
            return
        fused = self._load(sources, targets, length)
        bounds = split_evenly(length, self.comm.size)
        if is_half(fused.dtype):
            mine = slice(bounds[self.comm.rank], bounds[self.comm.rank + 1])
            outgoing = [fused[low:high] for low, high in pairwise(bounds)]
            self._reduce_pairwise(outgoing, fused[mine], op, prescale, finish)
            self._ring(fused, bounds, list(gather_steps(self.comm.rank, self.comm.size, self.comm.rank)))
        else:
            self.kernels.scale(fused, fused, prescale)
            steps = list(ring_steps(self.comm.rank, self.comm.size))
            self._ring(fused, bounds, steps, op, finish)
            if self.comm.size == 1:
                self.kernels.finish(fused, finish)
        if len(targets) > 1:
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
        outgoing = self._by_destination(sources, counts)
        if len(targets) == 1:
            self._reduce_pairwise(outgoing, targets[0], op, prescale, finish)
            return
        mine = self._scratch.take("result", sources[0].dtype, total_length(targets))
        self._reduce_pairwise(outgoing, mine, op, prescale, finish)
        distribute(mine, targets)

    def allgather(self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]) -> None:
        rank, size = self.comm.rank, self.comm.size
        raw_targets = [as_bytes(target) for target in targets]
        starts = [offsets([c * s.itemsize for c in count]) for count, s in zip(counts, sources, strict=True)]
        bounds = offsets([sum(start[r + 1] - start[r] for start in starts) for r in range(size)])
        single = len(targets) == 1
        fused = raw_targets[0] if single else self._scratch.take("fused", SUPPORTED["uint8"], bounds[-1])
        concatenate([as_bytes(source) for source in sources], fused[bounds[rank] : bounds[rank + 1]])
        self._ring(fused, bounds, list(gather_steps(rank, size, rank)))
        if not single:
            for r in range(size):
                places = [raw[s[r] : s[r + 1]] for raw, s in zip(raw_targets, starts, strict=True)]
                distribute(fused[bounds[r] : bounds[r + 1]], places)

    def broadcast(self, array: Array, root: int) -> None:
        """Pass chunks along a chain that starts at `root`: all links are busy once it is full."""
        rank, size = self.comm.rank, self.comm.size
        place = (rank - root) % size
        left, right = (rank - 1) % size, (rank + 1) % size
        parts = [as_bytes(array)[low:high] for low, high in chunks(array.nbytes, self._chunk_bytes)]
        arriving = [self.comm.irecv(part, left) for part in parts[:1]] if place > 0 else []
        leaving: list[Transfer] = []
        for k, part in enumerate(parts):
            if place > 0:
                arriving.extend(self.comm.irecv(following, left) for following in parts[k + 1 : k + 2])
                arriving.pop(0).wait()
            if place < size - 1:
                leaving.append(self.comm.isend(part, right))
            if len(leaving) > 2:
                leaving.pop(0).wait()
        _wait_all(leaving)

    def alltoall(self, source: Array, send: Sequence[int], target: Array, receive: Sequence[int]) -> None:
        rank, size = self.comm.rank, self.comm.size
        leaving, arriving = offsets(send), offsets(receive)
        target[arriving[rank] : arriving[rank + 1]] = source[leaving[rank] : leaving[rank + 1]]
        for distance in range(1, size):
            to, by = (rank + distance) % size, (rank - distance) % size
            outgoing, incoming = source[leaving[to] : leaving[to + 1]], target[arriving[by] : arriving[by + 1]]
            transfers = [self.comm.irecv(incoming, by)] if incoming.size else []
            if outgoing.size:
                transfers.append(self.comm.isend(outgoing, to))
            _wait_all(transfers)

    def tune(self, knobs: Knobs) -> None:
        self._chunk_bytes = max(knobs.ring_chunk, _LEAST_CHUNK)
        self._scratch.clear()

    def close(self) -> None:
        self._scratch.clear()
        self._adasum.clear()

    def _load(self, sources: Sequence[Array], targets: Sequence[Array], length: int) -> Array:
        """Return all sources as one array that may be overwritten: the target itself when there is only one."""
        if len(sources) == 1:
            if sources[0] is not targets[0]:
                np.copyto(targets[0], sources[0])
            return targets[0]
        fused = self._scratch.take("fused", sources[0].dtype, length)
        concatenate(sources, fused)
        return fused

    def _by_destination(self, sources: Sequence[Array], counts: Sequence[Sequence[int]]) -> list[Array]:
        """Return what goes to each rank, one run per rank."""
        starts = [offsets(count) for count in counts]
        runs = [[source[start[r] : start[r + 1]] for source, start in zip(sources, starts, strict=True)]
                for r in range(self.comm.size)]  # fmt: skip
        if len(sources) == 1:
            return [run[0] for run in runs]
        fused = self._scratch.take("fused", sources[0].dtype, total_length(sources))
        bounds = offsets([total_length(run) for run in runs])
        parts = [fused[low:high] for low, high in pairwise(bounds)]
        for run, part in zip(runs, parts, strict=True):
            concatenate(run, part)
        return parts

    def _reduce_pairwise(
        self, outgoing: Sequence[Array], out: Array, op: ReduceOp, prescale: float, finish: Finish
    ) -> None:
        """Send `outgoing[r]` to each rank r, and reduce in rank order what all send here into `out`.

        `out` may be `outgoing[rank]`. Two chunks per rank are under way, so scratch is bounded.
        """
        rank, size, dtype = self.comm.rank, self.comm.size, out.dtype
        # The chunks of all ranks together are the scratch: smaller ones when there are many ranks.
        capacity = max(1024, min(self._chunk_bytes, 4 * self._chunk_bytes // size)) // dtype.itemsize
        n_chunks = -(-max(part.size for part in outgoing) // capacity)
        halves = self._scratch.take("incoming", dtype, 2 * size * capacity).reshape(2, size, capacity)
        in_flight: list[tuple[list[Transfer], list[Transfer]]] = []

        def start(k: int) -> None:
            part = slice(k * capacity, (k + 1) * capacity)
            length = out[part].size
            arriving, leaving = [], []
            for distance in range(1, size):
                to, by = (rank + distance) % size, (rank - distance) % size
                if length:
                    arriving.append(self.comm.irecv(halves[k % 2, by, :length], by))
                if outgoing[to][part].size:
                    leaving.append(self.comm.isend(outgoing[to][part], to))
            in_flight.append((arriving, leaving))

        if n_chunks:
            start(0)
        pending: list[Transfer] = []
        for k in range(n_chunks):
            if k + 1 < n_chunks:
                start(k + 1)
            arriving, leaving = in_flight.pop(0)
            _wait_all(arriving)
            part = slice(k * capacity, (k + 1) * capacity)
            values = [outgoing[r][part] if r == rank else halves[k % 2, r, : out[part].size] for r in range(size)]
            self.kernels.reduce(op, values, out[part], prescale, finish)
            _wait_all(pending)
            pending = leaving
        _wait_all(pending)

    def _ring(
        self,
        buffer: Array,
        bounds: Sequence[int],
        steps: Sequence[RingStep],
        op: ReduceOp = ReduceOp.SUM,
        finish: Finish = NO_FINISH,
    ) -> None:
        """Run ring steps over the runs of `buffer` between `bounds`, one run per rank, in place.

        Each step is cut into equally many chunks. Chunk j of a step may leave once chunk j of the step
        before has arrived and been reduced; receives are posted some chunks ahead.
        """
        _Pipeline(self, buffer, bounds, steps, op, finish).run()


class _Pipeline:
    """The transfers of one trip around the ring, in order.

    While job t is completed, up to `ahead` later chunks are on their way in each direction. A chunk may leave once the
    same chunk of the step before is complete, which is `n_parts` jobs earlier. The slowest rank never waits:
    what it needs has left its neighbour already.
    """

    def __init__(
        self,
        backend: RingBackend,
        buffer: Array,
        bounds: Sequence[int],
        steps: Sequence[RingStep],
        op: ReduceOp,
        finish: Finish,
    ) -> None:
        self.comm, self.kernels = backend.comm, backend.kernels
        self.op, self.finish = op, finish
        longest = max(high - low for low, high in pairwise(bounds))
        capacity = max(1, backend._chunk_bytes // buffer.itemsize)
        self.n_parts = max(1, -(-longest // capacity))
        self.ahead = min(_AHEAD, self.n_parts)
        self.parts = [
            [buffer[low + a : low + b] for a, b in _pairs(split_evenly(high - low, self.n_parts))]
            for low, high in _pairs(bounds)
        ]
        self.jobs = [(step, j) for step in steps for j in range(self.n_parts)]
        self.last_reduce = max((k for k, step in enumerate(steps) if step.reduce), default=-1)
        self.inbox: list[Any] = []
        if self.last_reduce >= 0:
            part = -(-longest // self.n_parts)
            slots = self.ahead + 1
            scratch = backend._scratch.take("inbox", buffer.dtype, slots * part)
            self.inbox = [scratch[slot * part : (slot + 1) * part] for slot in range(slots)]
        self.right, self.left = (self.comm.rank + 1) % self.comm.size, (self.comm.rank - 1) % self.comm.size
        self.leaving: list[Transfer | None] = []
        self.arriving: list[tuple[Array, Transfer] | None] = []

    def run(self) -> None:
        n_jobs = len(self.jobs)
        if self.comm.size == 1 or not n_jobs:
            return
        for t in range(min(self.ahead, n_jobs)):
            self._receive(t)
        for t, (step, j) in enumerate(self.jobs):
            while len(self.leaving) < min(t + self.ahead, n_jobs):
                self._send(len(self.leaving))
            if t + self.ahead < n_jobs:
                self._receive(t + self.ahead)
            self._complete(t, step, j)
        for transfer in self.leaving:
            if transfer is not None:
                transfer.wait()

    def _send(self, t: int) -> None:
        step, j = self.jobs[t]
        part = self.parts[step.send][j]
        self.leaving.append(self.comm.isend(part, self.right) if part.size else None)

    def _receive(self, t: int) -> None:
        step, j = self.jobs[t]
        part = self.parts[step.receive][j]
        if part.size == 0:
            self.arriving.append(None)
            return
        if step.reduce:
            into = self.inbox[t % len(self.inbox)][: part.size]
        else:
            # What arrives here may still be leaving as a partial result: size - 1 steps ago.
            self._wait_left(t - (self.comm.size - 1) * self.n_parts)
            into = part
        self.arriving.append((into, self.comm.irecv(into, self.left)))

    def _complete(self, t: int, step: RingStep, j: int) -> None:
        arrived = self.arriving[t]
        self.arriving[t] = None
        if arrived is None:
            return
        values, transfer = arrived
        transfer.wait()
        if step.reduce:
            part = self.parts[step.receive][j]
            last = t // self.n_parts == self.last_reduce
            self.kernels.reduce(self.op, (values, part), part, 1.0, self.finish if last else NO_FINISH)

    def _wait_left(self, t: int) -> None:
        transfer = self.leaving[t] if t >= 0 else None
        if transfer is not None:
            transfer.wait()
            self.leaving[t] = None


def _pairs(bounds: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(bounds))


def _wait_all(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
