"""Ranks as threads of one process: for tests, and for a process that runs alone.

No MPI, no polling: every wait is on a lock, and `abort` by any rank ends all of them with an error, so that a
test with a failing rank ends too.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.comm.base import Communicator
from hvdlite.comm.doorbell import ThreadDoorbells
from hvdlite.comm.peer_memory import PeerMemory, open_peer_memory
from hvdlite.comm.segment import FlagSegment, blocks_of, check_equal_lengths, segment_bytes
from hvdlite.comm.shared import SharedSegment
from hvdlite.errors import CommunicationError, describe_ranks
from hvdlite.topology import Topology


def loopback_group(
    size: int, hosts: Sequence[str] | None = None, on_abort: Callable[[int], None] | None = None
) -> list[LoopbackCommunicator]:
    """Return the communicators of `size` ranks, one for each thread.

    Args:
        hosts: name of the host that each rank pretends to be on; one host by default.
        on_abort: what `abort` does instead of failing all ranks. A process that runs alone ends itself here.
    """
    names = tuple(hosts) if hosts is not None else ("localhost",) * size
    if size < 1 or len(names) != size:
        raise ValueError(
            f"a loopback group needs at least one rank and a host for each: size={size!r}, hosts={hosts!r}."
        )
    hub = _Hub(on_abort)
    group = hub.new_group(range(size))
    return [LoopbackCommunicator(rank, group, hub, names) for rank in range(size)]


class LoopbackCommunicator(Communicator):
    """One rank of a loopback group. Made by `loopback_group` and `create`.

    Sends are synchronous: `Transfer.wait` of a send returns when the receiver has the data. This finds
    programs that rely on MPI's buffers.
    """

    def __init__(self, rank: int, group: _Group, hub: _Hub, hosts: tuple[str, ...]) -> None:
        self.rank, self.size = rank, len(group.seats)
        self.topology = Topology(rank, hosts)
        self._group, self._hub = group, hub
        self._bells = group.bells[rank]
        self._inbox = group.inboxes[rank]

    def post(self, dest: int, message: bytes) -> None:
        self._check_peer(dest)
        if dest == self.rank:
            raise ValueError(f"rank {dest} posted a message to itself; control messages are for other ranks.")
        self._hub.check()
        self._group.inboxes[dest].append((self.rank, bytes(message)))
        self._bells.ring(dest)

    def poll(self) -> tuple[int, bytes] | None:
        self._hub.check()
        return self._inbox.popleft() if self._inbox else None

    def wait(self, timeout: float, eager: bool = False) -> None:
        self._hub.check()
        self._bells.wait(timeout)
        self._hub.check()

    def wake(self) -> None:
        self._bells.ring(self.rank)

    def ring(self, dest: int) -> None:
        self._bells.ring(dest)

    def isend(self, array: NDArray[Any], dest: int) -> _Parcel:
        self._check_peer(dest)
        return self._group.offer(_Parcel(self._hub, array, self.rank, dest, sending=True))

    def irecv(self, array: NDArray[Any], source: int) -> _Parcel:
        self._check_peer(source)
        return self._group.offer(_Parcel(self._hub, array, source, self.rank, sending=False))

    def allgather_bytes(self, mine: bytes) -> list[bytes]:
        return self._meet(bytes(mine))

    def barrier(self) -> None:
        self._meet(None)

    def exit_barrier(self, timeout: float = math.inf) -> bool:
        return self._group.meet(self.rank, None, timeout) is not None

    def create(self, ranks: Sequence[int]) -> LoopbackCommunicator | None:
        members = self.agree_on_members(ranks)
        seats = [self._group.seats[rank] for rank in members]
        group: _Group = self._meet(self._hub.new_group(seats) if self.rank == 0 else None)[0]
        if self.rank not in members:
            return None
        hosts = tuple(self.topology.hosts[rank] for rank in members)
        return LoopbackCommunicator(members.index(self.rank), group, self._hub, hosts)

    def shared_segment(self, nbytes: int) -> SharedSegment | None:
        if self.topology.n_hosts > 1:
            return None
        check_equal_lengths(self._meet(nbytes))
        mapping = self._meet(mmap.mmap(-1, segment_bytes(self.size, nbytes)) if self.rank == 0 else None)[0]
        return FlagSegment(self.rank, nbytes, mapping, self._bells, drive=self._hub.check)

    def shared_blocks(self, nbytes: int) -> list[NDArray[Any]] | None:
        if self.topology.n_hosts > 1:
            return None
        check_equal_lengths(self._meet(nbytes))
        mapping = self._meet(mmap.mmap(-1, segment_bytes(self.size, nbytes)) if self.rank == 0 else None)[0]
        return blocks_of(mapping, self.size, nbytes)

    def peer_memory(self) -> PeerMemory | None:
        return open_peer_memory(self.rank, self.allgather_bytes) if self.topology.n_hosts == 1 else None

    def close(self) -> None:
        """Forget the group. Not really collective here: nothing needs the others."""

    def abort(self, code: int) -> None:
        """Make all blocked and all later calls of all ranks raise `CommunicationError`. Returns."""
        self._hub.abort(self._group.seats[self.rank], code)

    def _meet(self, mine: Any) -> list[Any]:
        values = self._group.meet(self.rank, mine)
        assert values is not None  # only a time limit returns None
        return values

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size:
            raise ValueError(f"rank {peer} is not in a group of {self.size} ranks.")


class _Hub:
    """What all groups made from one `loopback_group` share: one lock, and the abort."""

    def __init__(self, on_abort: Callable[[int], None] | None) -> None:
        self.lock = threading.Lock()
        self.failure = ""
        self._on_abort = on_abort
        self._groups: list[_Group] = []

    def new_group(self, seats: Sequence[int]) -> _Group:
        group = _Group(self, list(seats))
        with self.lock:
            self._groups.append(group)
        return group

    def check(self) -> bool:
        """Raise if a rank has aborted. (False: nothing that a waiting segment would have to drive.)"""
        if self.failure:
            raise CommunicationError(self.failure)
        return False

    def abort(self, seat: int, code: int) -> None:
        if self._on_abort is not None:
            self._on_abort(code)
        with self.lock:
            self.failure = self.failure or f"rank {seat} aborted all ranks with exit status {code}."
            for group in self._groups:
                group.release_all()


class _Group:
    """What the ranks of one communicator share. `seats[r]` is the number of rank r in the hub."""

    def __init__(self, hub: _Hub, seats: list[int]) -> None:
        self.seats = seats
        self.bells = ThreadDoorbells.group(len(seats))
        self.inboxes: list[deque[tuple[int, bytes]]] = [deque() for _ in seats]
        self._hub = hub
        self._unmatched: dict[tuple[int, int], deque[_Parcel]] = {}
        self._meeting = _Meeting(len(seats))
        self._everyone_came = threading.Condition(hub.lock)

    def offer(self, parcel: _Parcel) -> _Parcel:
        """Put one side of a transfer down; whoever brings the second side copies."""
        with self._hub.lock:
            self._hub.check()
            queue = self._unmatched.setdefault((parcel.source, parcel.dest), deque())
            if not queue or queue[0].sending == parcel.sending:
                queue.append(parcel)
                return parcel
            other = queue.popleft()
        sent, received = (parcel, other) if parcel.sending else (other, parcel)
        problem = received.fill_from(sent)
        other.finish(problem)
        parcel.finish(problem)
        return parcel

    def meet(self, rank: int, mine: Any, timeout: float = math.inf) -> list[Any] | None:
        """Return what all ranks brought, in rank order, or None if some did not come in time."""
        with self._hub.lock:
            self._hub.check()
            meeting = self._meeting
            meeting.brought[rank] = mine
            meeting.missing.discard(rank)
            if not meeting.missing:
                self._meeting = _Meeting(len(self.seats))
                self._everyone_came.notify_all()
            limit = None if timeout == math.inf else timeout
            came = self._everyone_came.wait_for(lambda: not meeting.missing or self._hub.failure, limit)
            if meeting.missing:
                self._hub.check()
            return meeting.brought if came else None

    def release_all(self) -> None:
        """Wake every rank that waits here, to find the failure. The lock is held."""
        self._everyone_came.notify_all()
        for queue in self._unmatched.values():
            for parcel in queue:
                parcel.finish(self._hub.failure)
            queue.clear()
        for rank, bells in enumerate(self.bells):
            bells.ring(rank)
            bells.nudge(rank)


class _Meeting:
    """One round of `_Group.meet`."""

    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self.missing = set(range(size))


class _Parcel:
    """One side of a data transfer."""

    def __init__(self, hub: _Hub, array: NDArray[Any], source: int, dest: int, sending: bool) -> None:
        self.array, self.source, self.dest, self.sending = array, source, dest, sending
        self._hub = hub
        self._problem = ""
        self._done = threading.Lock()
        self._done.acquire()

    def fill_from(self, sent: _Parcel) -> str:
        """Copy, and return what is wrong or ""."""
        if sent.array.size != self.array.size or sent.array.dtype != self.array.dtype:
            return (
                f"rank {self.source} sent {sent.array.size} elements of {sent.array.dtype}, but "
                f"{describe_ranks([self.dest])} receives {self.array.size} of {self.array.dtype}."
            )
        np.copyto(self.array, sent.array)
        return ""

    def finish(self, problem: str) -> None:
        self._problem = problem
        self._done.release()

    def wait(self) -> None:
        with self._done:  # released once; taken and given back, so that a second wait returns too
            pass
        if self._problem:
            raise CommunicationError(self._problem)
