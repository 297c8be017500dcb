"""Several ranks on each of several hosts: memory within a host, and each byte once across the network.

The ranks of a host reduce their values in shared memory, each of them one *slice*; the ranks that own the same slice
on all hosts are a *lane*, and reduce it over the network, all lanes at once; the ranks of a host collect the slices
through shared memory. There are as many lanes as the host with the fewest ranks has ranks, so with equally many on
each every rank owns a slice, and beside a host with one rank there is one lane of leaders.

                    bytes that a host sends
    allreduce       2 S (H - 1) / H              a flat ring: 2 S (P - 1) / P, and more where the ranks
    broadcast       S                            of a host are not neighbours in it
    others          as the ring's and the tree's

P = ranks, H = hosts, S = buffer bytes. Half types travel as float32 while they are summed, and come back as halves:
3 S (H - 1) / H, where a flat ring would send S (L (H - 1) / H + (P - 1) / P) with L ranks on each host.

Large ones go in pieces: while a piece crosses the network, on a thread of its own, the piece before it is collected and
the next one reduced in shared memory. What is left of memory's time beside the network's are the first and
the last piece.

Small messages take one lane and recursive doubling: log2(H) trips across the network instead of log2(P).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hvdlite.collectives.adasum import Adasum
from hvdlite.collectives.base import Array, Backend
from hvdlite.collectives.local import LocalBackend
from hvdlite.collectives.pack import Scratch, as_bytes, distribute, offsets, total_length
from hvdlite.collectives.ring import CHUNK_BYTES, RingBackend
from hvdlite.collectives.schedules import chunks, pieces, split_evenly
from hvdlite.collectives.shared_memory import SharedMemoryBackend
from hvdlite.collectives.tree import TreeBackend
from hvdlite.collectives.worker import Task, Worker
from hvdlite.comm.base import Communicator
from hvdlite.comm.shared import SharedSegment
from hvdlite.dtypes import SUPPORTED, ReduceOp, is_half
from hvdlite.kernels import NO_FINISH, Finish, Kernels
from hvdlite.messages import Knobs
from hvdlite.topology import Topology

_ROUNDS = 4  # of shared memory in a piece that crosses the network while others are in memory
_BROADCAST_BYTES = 4 * 2**20  # of a piece: the network fetches the next while the host copies this one


class Levels(NamedTuple):
    """The groups that the backend works with, as one rank sees them.

    Attributes:
        local: the ranks of this host.
        segment: what they share, or None if there is no room for it (or nobody to share it with).
        lane: the ranks that own this rank's slice, one per host, in the order of the hosts; None if it owns none.
        lanes: the members of each lane, ranks of the whole group.
    """

    local: Communicator
    segment: SharedSegment | None
    lane: Communicator | None
    lanes: tuple[tuple[int, ...], ...]

    def close(self) -> None:
        """Give the groups back. Collective over all of them."""
        if self.segment is not None:
            self.segment.close()
        if self.lane is not None:
            self.lane.close()
        self.local.close()


def lanes(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each lane. Hosts are in the order of their first ranks, the same for all lanes."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(topology.hosts):
        by_host.setdefault(host, []).append(rank)
    return tuple(zip(*by_host.values(), strict=False))  # as long as the shortest


def make_levels(comm: Communicator, room: int) -> Levels:
    """Return the groups of `comm` for hierarchical collectives. Collective.

    Args:
        room: of each rank in the segments of the hosts, bytes. 0: the ranks of a host exchange messages.
    """
    local = lane = None
    for host in dict.fromkeys(comm.topology.hosts):
        members = [rank for rank, name in enumerate(comm.topology.hosts) if name == host]
        local = comm.create(members) or local
    assert local is not None
    crossing = lanes(comm.topology)
    for ranks in crossing:
        lane = comm.create(ranks) or lane
    segment = local.shared_segment(room) if room and local.size > 1 else None
    return Levels(local, segment, lane, crossing)


class HierarchicalBackend(Backend):
    """Ranks on several hosts, of which at least one has several.

    Args:
        levels: made by `make_levels` with room for pieces of `piece_bytes`; not closed here.
        small_bytes: up to here one lane does the work, with the fewest trips across the network.
    """

    name = "hierarchical"

    def __init__(
        self,
        comm: Communicator,
        kernels: Kernels,
        levels: Levels,
        piece_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        small_bytes: int = 0,
    ) -> None:
        super().__init__(comm, kernels)
        self._levels, self._small_bytes = levels, small_bytes
        self._scratch = Scratch()
        self._flat_ring = RingBackend(comm, kernels, chunk_bytes)
        self._adasum = Adasum(comm, kernels)
        self._local = self._make_local(piece_bytes, chunk_bytes)
        self._piece_bytes, self._overlaps = _ROUNDS * piece_bytes, comm.any_threads
        self._network = Worker("hvdlite network")
        self._ring: RingBackend | None = None
        self._ring_beside: RingBackend | None = None
        self._tree: TreeBackend | None = None
        if levels.lane is not None:
            self._ring = RingBackend(levels.lane, kernels, chunk_bytes)
            # Kernels have scratch of their own, and these are used while the others are.
            self._ring_beside = RingBackend(levels.lane, Kernels(), chunk_bytes)
            self._tree = TreeBackend(levels.lane, kernels, chunk_bytes)
        hosts = comm.topology.hosts
        self._host_of = [[hosts[rank] for rank in levels.lanes[0]].index(host) for host in hosts]

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
        elif length := total_length(sources):
            if is_half(sources[0].dtype):
                self._reduce_halves(length, sources, targets, (op, prescale, finish))
            elif self._overlaps and length * sources[0].itemsize >= 2 * self._piece_bytes:
                self._reduce_pieces(length, sources, targets, (op, prescale, finish))
            else:
                self._reduce(length, sources, targets, (op, prescale, finish))

    def reducescatter(
        self,
        sources: Sequence[Array],
        counts: Sequence[Sequence[int]],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        self._flat_ring.reducescatter(sources, counts, targets, op, prescale, finish)

    def allgather(self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]) -> None:
        self._flat_ring.allgather(sources, counts, targets)

    def broadcast(self, array: Array, root: int) -> None:
        """Send `array` along the lane that the root owns, or to another lane's owner on its host first."""
        members = [rank for rank, host in enumerate(self._host_of) if host == self._host_of[root]]
        place = members.index(root)
        owns = place < len(self._levels.lanes)
        at_home = self._host_of[self.comm.rank] == self._host_of[root]
        number = place if owns else 0
        raw = as_bytes(array)
        for low, high in chunks(raw.size, _BROADCAST_BYTES):
            part = raw[low:high]
            if at_home and not owns:
                self._local.broadcast(part, place)
            if self.comm.rank in self._levels.lanes[number]:
                self._across(part.size).broadcast(part, self._host_of[root])
            if owns or not at_home:
                self._local.broadcast(part, number)

    def alltoall(self, source: Array, send: Sequence[int], target: Array, receive: Sequence[int]) -> None:
        self._flat_ring.alltoall(source, send, target, receive)

    def tune(self, knobs: Knobs) -> None:
        self._small_bytes, self._piece_bytes = knobs.small_message, _ROUNDS * knobs.shared_memory_piece
        for backend in self._parts():
            backend.tune(knobs)

    def close(self) -> None:
        self._network.close()
        for backend in self._parts():
            backend.close()
        self._scratch.clear()
        self._adasum.clear()

    def _parts(self) -> list[Backend]:
        parts = (self._local, self._ring, self._ring_beside, self._tree, self._flat_ring)
        return [backend for backend in parts if backend is not None]

    def _make_local(self, piece_bytes: int, chunk_bytes: int) -> Backend:
        local, segment = self._levels.local, self._levels.segment
        if local.size == 1:
            return LocalBackend(local, self.kernels)
        if segment is None:
            return RingBackend(local, self.kernels, chunk_bytes)
        return SharedMemoryBackend(local, self.kernels, segment, piece_bytes)

    def _reduce(
        self, length: int, sources: Sequence[Array], targets: Sequence[Array], how: tuple[ReduceOp, float, Finish]
    ) -> None:
        op, prescale, finish = how
        counts = self._slices([source.size for source in sources], length * sources[0].itemsize)
        mine = self._mine(targets, counts)
        self._local.reducescatter(sources, counts, mine, op, prescale)
        if total_length(mine):
            self._across(length * sources[0].itemsize).allreduce(mine, mine, op, 1.0, finish)
        self._local.allgather(mine, counts, targets)

    def _reduce_pieces(
        self, length: int, sources: Sequence[Array], targets: Sequence[Array], how: tuple[ReduceOp, float, Finish]
    ) -> None:
        """`_reduce` piece by piece. In shared memory all ranks of a host do the same in the same order."""
        op, prescale, finish = how
        nbytes = length * sources[0].itemsize
        crossing: tuple[Task | None, Sequence[Array], Sequence[Sequence[int]], Sequence[Array]] | None = None
        for parts in pieces([source.size for source in sources], self._piece_bytes // sources[0].itemsize):
            some = [sources[part.tensor][part.start : part.stop] for part in parts]
            into = [targets[part.tensor][part.start : part.stop] for part in parts]
            counts = self._slices([array.size for array in some], nbytes)
            mine = self._mine(into, counts)
            self._local.reducescatter(some, counts, mine, op, prescale)
            task = None
            if total_length(mine):
                assert self._ring_beside is not None
                reduce = self._ring_beside.allreduce
                task = self._network.submit(functools.partial(reduce, mine, mine, op, 1.0, finish))
            if crossing is not None:
                self._collect(*crossing)
            crossing = task, mine, counts, into
        assert crossing is not None
        self._collect(*crossing)

    def _collect(
        self, crossing: Task | None, mine: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]
    ) -> None:
        if crossing is not None:
            crossing.wait()
        self._local.allgather(mine, counts, targets)

    def _reduce_halves(
        self, length: int, sources: Sequence[Array], targets: Sequence[Array], how: tuple[ReduceOp, float, Finish]
    ) -> None:
        """Sum in float32 on the whole way, and round once, before the slices come back."""
        op, prescale, finish = how
        wide = self._scratch.take("wide", SUPPORTED["float32"], length)
        bounds = offsets([source.size for source in sources])
        for source, (low, high) in zip(sources, pairwise(bounds), strict=True):
            self.kernels.widen(source, wide[low:high])
        (whole,) = self._slices([length], wide.nbytes)
        start = sum(whole[: self._levels.local.rank])
        mine = wide[start : start + whole[self._levels.local.rank]]
        self._local.reducescatter([wide], [whole], [mine], op, prescale)
        counts = self._slices([source.size for source in sources], wide.nbytes)
        rounded = self._mine(targets, counts)
        if mine.size:
            self._reduce_slice(mine, rounded, wide.nbytes, op, finish)
        self._local.allgather(rounded, counts, targets)

    def _reduce_slice(self, mine: Array, rounded: Sequence[Array], nbytes: int, op: ReduceOp, finish: Finish) -> None:
        """Reduce the float32 slice over the lane, and store it, rounded, in the halves `rounded`."""
        lane = self._levels.lane
        assert lane is not None
        halves = self._scratch.take("halves", rounded[0].dtype, mine.size)
        across = self._across(nbytes)
        if across is self._tree:
            across.allreduce([mine], [mine], op, 1.0, finish)
            self.kernels.narrow(mine, halves)
        else:
            bounds = split_evenly(mine.size, lane.size)
            shares = [high - low for low, high in pairwise(bounds)]
            own = slice(bounds[lane.rank], bounds[lane.rank + 1])
            across.reducescatter([mine], [shares], [mine[own]], op, 1.0, finish)
            self.kernels.narrow(mine[own], halves[own])
            across.allgather([halves[own]], [shares], [halves])
        distribute(halves, rounded)

    def _across(self, nbytes: int) -> Backend:
        """Return the backend of this rank's lane for tensors of `nbytes`."""
        chosen = self._tree if nbytes <= self._small_bytes else self._ring
        assert chosen is not None
        return chosen

    def _slices(self, lengths: Sequence[int], nbytes: int) -> list[list[int]]:
        """Return how many elements of each tensor lie in the slice of each rank of this host."""
        n_lanes = 1 if nbytes <= self._small_bytes else len(self._levels.lanes)
        bounds = split_evenly(sum(lengths), n_lanes)
        bounds += [bounds[-1]] * (self._levels.local.size - n_lanes)  # the others own nothing
        return [
            [max(0, min(high, stop) - max(low, start)) for low, high in pairwise(bounds)]
            for start, stop in pairwise(offsets(lengths))
        ]

    def _mine(self, targets: Sequence[Array], counts: Sequence[Sequence[int]]) -> list[Array]:
        """Return this rank's slice of each tensor."""
        me, found = self._levels.local.rank, []
        for target, count in zip(targets, counts, strict=True):
            start = sum(count[:me])
            found.append(target[start : start + count[me]])
        return found
