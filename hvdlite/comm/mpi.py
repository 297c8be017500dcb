"""Ranks as processes started by MPI. The only file that imports mpi4py, and itself imported late.

Importing mpi4py starts MPI (with threads, to be finalised at exit) unless the program started it before; then
it stays the program's. Control messages travel on one private communicator of the group, data on another. A
rank of the same host is woken by its doorbell, so that nobody polls; ranks of other hosts cannot ring,
and are polled, with pauses that grow in proportion to the wait.

Transfers between hosts take far longer than a switch of processes, so waiting for one does not spin as MPI's own
waiting does: that takes a core from whoever computes, and from the kernel's side of the network.

Hosts are told apart by name: that is what containers and batch systems give to each machine. (A boot id
would join namespaces that share no memory.)
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI as MPI  # for comm.mpi_native, too
from numpy.typing import NDArray

from hvdlite.comm.base import Communicator
from hvdlite.comm.doorbell import open_doorbells
from hvdlite.comm.losses import Losses
from hvdlite.comm.mailbox import Mailboxes, mailbox_bytes
from hvdlite.comm.peer_memory import PeerMemory, open_peer_memory
from hvdlite.comm.segment import FlagSegment, block_places, blocks_of, map_shared, remove_left_behind
from hvdlite.comm.shared import SharedSegment
from hvdlite.config import Config
from hvdlite.errors import CommunicationError, InvalidRequestError, NotMemberError
from hvdlite.topology import Topology

if TYPE_CHECKING:
    from hvdlite.comm.mpi_native import NativeCollectives

_MORE, _LAST = 1, 2  # tags of control messages: a piece, and the last piece
_DATA = 3
_NUMBER_BYTES = 8  # of a message's number, before one that found no room in the mailbox
_SMALL = 2048  # bytes; below every MPI's eager limit, so that receiving such a message waits for nobody
_TESTS = 200  # for a message that is expected, before the first sleep: about 50 us
_TRANSFER_TESTS = 50  # of a transfer before the first nap
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 20e-3  # seconds
_NAP_SHARE = 1 / 16  # of the wait so far that a nap may last: what came is noticed that much too late at most
_LOSSY_END = 10.0  # seconds for the last barrier, after a loss of ranks: all is done by then
_EAGER_NAP = 1e-3  # seconds; the longest while a message is expected
_SAFETY_NAP = 0.25  # seconds; the longest where everyone can ring: bounds what a late message after its ring costs


@dataclass(frozen=True)
class Place:
    """How a process waits, and where it puts shared memory.

    Attributes:
        segment_directory: of a memory file system.
        spin: seconds to spin before sleeping.
        crowded: ranks outnumber cores on this host.
        scarce: or on some other host: MPI's own busy waiting would starve others.
    """

    segment_directory: str
    spin: float
    crowded: bool
    scarce: bool


def world(
    ranks: Sequence[int] | None = None,
    comm: MPI.Intracomm | None = None,
    *,
    config: Config | None = None,
    host: str | None = None,
    may_lose: bool = False,
) -> MpiCommunicator:
    """Return a new group over MPI, and start MPI if nobody has. Collective over the members.

    Args:
        ranks: members as ranks of MPI_COMM_WORLD, in the wanted order; only they may call. Default: all.
        comm: an mpi4py communicator to duplicate, instead of `ranks`.
        config: says where shared segments are made, and how long to spin.
        host: name under which this process' host is known, to pretend that there are several.
        may_lose: MPI goes on when ranks are lost, and so may this group.
    """
    _start_mpi()
    config = config or Config()
    losses = _watch_losses(config) if may_lose else None
    with as_communication_error("setting up the ranks"):
        control = _private_copy(ranks, comm)
        control.Set_errhandler(MPI.ERRORS_RETURN)
        hosts, place = _survey(control, host or socket.gethostname(), config.shared_memory_dir, config.spin)
        pids = _allgather_bytes(control, b"%d" % os.getpid()) if losses is not None else []
        return MpiCommunicator(control, hosts, place, losses, [int(pid) for pid in pids])


def _watch_losses(config: Config) -> Losses:
    with as_communication_error("setting up the watch of lost ranks"):
        base = MPI.COMM_WORLD.Dup()
        base.Set_errhandler(MPI.ERRORS_RETURN)
    found = Losses(base, config.elastic_in_place_timeout if config.elastic_in_place else math.inf, abort)
    found.start()
    return found


class _End:
    is_abrupt = False


def never_finalize() -> None:
    """Let this process end, when its other exit handlers have run, without MPI_Finalize.

    That hangs once ranks were lost (measured here: 4 of 12 jobs of 4 ranks of which 2 were killed at once).
    """
    _End.is_abrupt = True


def _leave_abruptly() -> None:
    if _End.is_abrupt:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(0)  # mpi4py would finalize MPI as the last thing of all


def start() -> tuple[int, int]:
    """Start MPI if nobody has, and return this process' rank in the whole job, and the number of ranks."""
    _start_mpi()
    atexit.register(_leave_abruptly)
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def abort(code: int) -> None:
    """End all ranks of the job now, with exit status `code`. Does not return."""
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # MPICH's comes back at times, and lets this rank go on until mpirun has heard of it


def library_version() -> str:
    """Return what the MPI library says of itself."""
    return MPI.Get_library_version().rstrip("\x00").strip()


def thread_level() -> str:
    """Return what MPI allows to threads: `single`, `funneled`, `serialized` or `multiple`."""
    known = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    return known.get(MPI.Query_thread(), "multiple")


def ranks_within(world: Communicator, comm: MPI.Comm) -> list[int]:
    """Return the ranks in `world` of the members of an mpi4py communicator, in its order. Local."""
    if not isinstance(world, MpiCommunicator) or not isinstance(comm, MPI.Intracomm):
        raise InvalidRequestError(f"{comm!r} is not an mpi4py intracommunicator within this MPI job.")
    ranks = world.translate(comm.Get_group())
    if MPI.UNDEFINED in ranks:
        raise InvalidRequestError(f"{comm!r} has members that are not among hvdlite's {world.size} ranks.")
    return ranks


def _start_mpi() -> None:
    if MPI.Is_finalized():
        raise CommunicationError("MPI was finalised; it cannot start again in this process. Start a new process.")
    if not MPI.Is_initialized():  # mpi4py.rc.initialize is off
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize)


def _finalize() -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


def _private_copy(ranks: Sequence[int] | None, comm: MPI.Intracomm | None) -> MPI.Intracomm:
    if comm is not None:
        if ranks is not None or not isinstance(comm, MPI.Intracomm):
            raise InvalidRequestError(f"expected either ranks or an mpi4py intracommunicator: {ranks!r}, {comm!r}.")
        return comm.Dup()
    if ranks is None:
        return MPI.COMM_WORLD.Dup()
    members, size = [int(rank) for rank in ranks], MPI.COMM_WORLD.size
    if len(set(members)) != len(members) or not all(0 <= rank < size for rank in members):
        raise InvalidRequestError(f"ranks {members} are not distinct ranks from 0 to {size - 1}.")
    if MPI.COMM_WORLD.rank not in members:
        raise NotMemberError(f"rank {MPI.COMM_WORLD.rank} is not one of the ranks {members}.")
    group = MPI.COMM_WORLD.Get_group().Incl(members)
    return MPI.COMM_WORLD.Create_group(group)


def _copy(comm: MPI.Intracomm, losses: Losses | None) -> MPI.Intracomm:
    """Return a communicator of the same ranks. Collective.

    Where ranks can be lost, by Shrink: it ends in the same way on all ranks, whoever is lost meanwhile. In Dup some
    fail, and others wait for those for ever, also when it is revoked.
    """
    if losses is None:
        return comm.Dup()
    copy: Any = comm.Shrink()
    copy.Set_errhandler(MPI.ERRORS_RETURN)
    if copy.size != comm.size:
        losses.keep(copy)
        raise CommunicationError(f"{comm.size - copy.size} of {comm.size} ranks died or cannot be reached.")
    return copy  # type: ignore[no-any-return]


def _survey(control: MPI.Intracomm, host: str, segment_directory: str, spin: float) -> tuple[tuple[str, ...], Place]:
    """Exchange host names and cores."""
    cores = " ".join(map(str, os.sched_getaffinity(0)))
    said = [text.decode().split("\n") for text in _allgather_bytes(control, f"{host}\n{cores}".encode())]
    hosts = tuple(name for name, _ in said)
    cores_of: dict[str, set[str]] = {}
    for name, text in said:
        cores_of.setdefault(name, set()).update(text.split())
    scarce = {name for name, known in cores_of.items() if hosts.count(name) > len(known)}
    return hosts, Place(segment_directory, spin, host in scarce, bool(scarce))


class MpiCommunicator(Communicator):
    """A group of MPI processes. Made by `world` and `create`.

    Args:
        control: private to this object, which frees it.
        hosts: host name of each rank.
        losses, pids: of the whole job, where it may lose ranks, and its process numbers.
    """

    chunk_bytes = 2**30  # of one MPI message; MPI counts in C ints

    def __init__(
        self,
        control: MPI.Intracomm,
        hosts: tuple[str, ...],
        place: Place,
        losses: Losses | None = None,
        pids: Sequence[int] = (),
    ) -> None:
        self.rank, self.size = control.rank, control.size
        self.topology = Topology(self.rank, hosts)
        self._control, self._data, self._place = control, _copy(control, losses), place
        self.losses, self._pids = losses, pids
        if losses is not None:
            losses.guard(self, (self._control, self._data), lambda: None)
        local = self.topology.local_ranks
        self._bells = open_doorbells(
            local, self.rank, self.allgather_bytes, [place.segment_directory], place.spin, place.crowded
        )
        if losses is not None:
            losses.guard(self, (self._control, self._data), self.wake)
        self._bell_of = {rank: number for number, rank in enumerate(local)}
        self._all_can_ring = self.topology.n_hosts == 1
        self._naps = place.scarce or not self._all_can_ring
        self.any_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._outbox: deque[MPI.Request] = deque()
        self._arriving: deque[_Arriving] = deque()
        self._pieces: dict[int, list[bytearray]] = {}
        self._status = MPI.Status()
        self._small = bytearray(_SMALL)
        self._mail = self._open_mailboxes()

    def translate(self, group: MPI.Group) -> list[int]:
        """Return the rank here of each member of `group`, or `MPI.UNDEFINED`."""
        return MPI.Group.Translate_ranks(group, None, self._control.Get_group())

    @property
    def native(self) -> NativeCollectives:
        from hvdlite.comm.mpi_native import NativeCollectives  # which imports this file

        return NativeCollectives(self._data)

    def _open_mailboxes(self) -> Mailboxes | None:
        nbytes = mailbox_bytes(self.size) if self._all_can_ring else 0
        if not nbytes:
            return None
        place = self._place.segment_directory
        mapping = map_shared(self.rank, self.size, nbytes, self.allgather_bytes, place)
        return None if mapping is None else Mailboxes(self.rank, self.size, mapping, *block_places(self.size, nbytes))

    def post(self, dest: int, message: bytes) -> None:
        if dest == self.rank:
            raise ValueError(f"rank {dest} posted a message to itself; control messages are for other ranks.")
        if self._mail is None:
            self._send(dest, message)
        elif number := self._mail.post(dest, message):
            self._send(dest, number.to_bytes(_NUMBER_BYTES, "little") + message)
        if dest in self._bell_of:
            self._bells.ring(self._bell_of[dest])

    def _send(self, dest: int, message: bytes) -> None:
        with as_communication_error("a control message to rank", dest):
            if len(message) <= self.chunk_bytes:
                self._post_piece(dest, message, _LAST)
                return
            view, step = memoryview(message), self.chunk_bytes
            for start in range(0, len(view), step):
                self._post_piece(dest, view[start : start + step], _LAST if start + step >= len(view) else _MORE)

    def _post_piece(self, dest: int, piece: bytes | memoryview, tag: int) -> None:
        request = self._control.Isend([piece, len(piece), MPI.BYTE], dest, tag)
        if self._outbox or not request.Test():
            self._outbox.append(request)  # which keeps the bytes alive, too

    def poll(self) -> tuple[int, bytes] | None:
        if self._outbox:
            self._drive()
        if self._mail is None:
            return self._receive()
        while (found := self._mail.take()) is not None:
            source, message = found
            if message is not None:
                return source, message
            received = self._receive()
            if received is None:
                return None  # its bytes are still coming
            source, message = received
            number = int.from_bytes(message[:_NUMBER_BYTES], "little")
            self._mail.hand_in(source, number, message[_NUMBER_BYTES:])
        return None

    def _receive(self) -> tuple[int, bytes] | None:
        """Return the next control message that MPI has brought."""
        with as_communication_error("receiving control messages"):
            self._drive()
            status = self._status
            while self._probe(status):
                source, tag, count = status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)
                if count <= _SMALL and tag == _LAST and not self._arriving and not self._pieces:
                    self._control.Recv([self._small, count, MPI.BYTE], source, tag)
                    return source, bytes(memoryview(self._small)[:count])
                # A large message needs its sender's help, who may be busy elsewhere: do not wait for it.
                buffer = bytearray(count)
                request = self._control.Irecv([buffer, count, MPI.BYTE], source, tag)
                self._arriving.append(_Arriving(source, tag == _LAST, buffer, request))
            return self._next_arrived() if self._arriving else None

    def _probe(self, status: MPI.Status) -> bool:
        # Open MPI's Iprobe looks first and makes progress afterwards, so what has just arrived shows
        # only the second time. The bell that announced it has been answered by then: look twice.
        probe = self._control.Iprobe
        return probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) or probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)

    def _next_arrived(self) -> tuple[int, bytes] | None:
        """Return the first complete message that no earlier one from its sender holds up."""
        held_up: set[int] = set()
        for piece in list(self._arriving):
            if piece.source in held_up or not piece.request.Test():
                held_up.add(piece.source)
                continue
            self._arriving.remove(piece)
            pieces = self._pieces.setdefault(piece.source, [])
            pieces.append(piece.buffer)
            if piece.is_last:
                del self._pieces[piece.source]
                return piece.source, b"".join(pieces)
        return None

    def _drive(self) -> bool:
        """Let MPI work on what was posted. True if some of it is still here."""
        if self.losses is not None:
            self.losses.check()
        while self._outbox and self._outbox[0].Test():
            self._outbox.popleft()
        return bool(self._outbox)

    def wait(self, timeout: float, eager: bool = False) -> None:
        started, nap = time.monotonic(), _SHORTEST_NAP
        with as_communication_error("waiting for control messages"):
            while not self._bells.wait(0.0):
                if self.losses is not None:
                    self.losses.check()
                all_rings = self._all_can_ring and not self._drive() and not self._arriving
                if not self._all_can_ring and self._glance(_TESTS if eager else 2):
                    return
                if self._arriving and any(self._arriving[0].request.Test() for _ in range(_TESTS)):
                    return  # its sender has heard of it by now, and is moving it
                waited = time.monotonic() - started
                left = timeout - waited
                if left <= 0:
                    return
                if all_rings:
                    nap = min(max(2 * nap, _EAGER_NAP), _SAFETY_NAP)
                elif eager:
                    nap = min(max(waited * _NAP_SHARE, _SHORTEST_NAP), _EAGER_NAP)
                else:
                    nap = min(2 * nap, _LONGEST_NAP)
                spin = eager and len(self._bell_of) > 1  # nobody rings a rank that is alone on its host
                if self._bells.wait(min(left, nap), spin) or self._arriving or self._glance(2):
                    return

    def _glance(self, times: int) -> bool:
        """True if a control message is here. Look twice at least: Open MPI looks first and fetches afterwards."""
        probe, source, tag = self._control.Iprobe, MPI.ANY_SOURCE, MPI.ANY_TAG
        return any(probe(source, tag) for _ in range(times))

    def wake(self) -> None:
        self._bells.ring(self._bells.rank)

    def ring(self, dest: int) -> None:
        self._bells.ring(self._bell_of[dest])

    def isend(self, array: NDArray[Any], dest: int) -> MpiTransfer:
        with as_communication_error("sending to rank", dest):
            parts = [self._data.Isend(part, dest, _DATA) for part in self._parts(array)]
        return MpiTransfer(parts, self._naps, self.losses, "sending to rank", dest)

    def irecv(self, array: NDArray[Any], source: int) -> MpiTransfer:
        with as_communication_error("receiving from rank", source):
            parts = [self._data.Irecv(part, source, _DATA) for part in self._parts(array)]
        return MpiTransfer(parts, self._naps, self.losses, "receiving from rank", source)

    def _parts(self, array: NDArray[Any]) -> list[Any]:
        """Return what MPI takes for the bytes of `array`: it must not know bfloat16, nor counts beyond an int."""
        view = array.view(np.uint8)
        if view.nbytes <= self.chunk_bytes:
            return [[view, view.nbytes, MPI.BYTE]]
        pieces = [view[start : start + self.chunk_bytes] for start in range(0, view.nbytes, self.chunk_bytes)]
        return [[piece, piece.nbytes, MPI.BYTE] for piece in pieces]

    def allgather_bytes(self, mine: bytes) -> list[bytes]:
        with as_communication_error("an all-gather"):
            return _allgather_bytes(self._control, mine)

    def barrier(self) -> None:
        with as_communication_error("a barrier"):
            _finish(self._control.Ibarrier(), self._naps, self.losses)

    def exit_barrier(self, timeout: float = math.inf) -> bool:
        if self.losses is not None and self.losses.has_happened:
            timeout = min(timeout, _LOSSY_END)
        deadline, nap = time.monotonic() + timeout, _EAGER_NAP
        try:
            with as_communication_error("the barrier at the end"):
                request = self._control.Ibarrier()
                while not request.Test():
                    if time.monotonic() > deadline:
                        return False
                    self._drive()
                    time.sleep(nap)
                    nap = min(2 * nap, _LONGEST_NAP)
        except CommunicationError:
            if self.losses is None:
                raise
            # The first one to leave is lost to the others, and so is one that dies here: nobody needs it any more.
        return True

    def create(self, ranks: Sequence[int]) -> MpiCommunicator | None:
        members = self.agree_on_members(ranks)
        with as_communication_error("making the group of ranks", members):
            if self.losses is not None and len(members) == self.size and members == sorted(members):
                control: Any = _copy(self._control, self.losses)
            else:
                control = self._control.Create(self._control.Get_group().Incl(members))
            if control == MPI.COMM_NULL:
                return None
            return MpiCommunicator(
                control, tuple(self.topology.hosts[rank] for rank in members), self._place, self.losses
            )

    def shared_segment(self, nbytes: int) -> SharedSegment | None:
        if not self._all_can_ring:
            return None
        mapping = map_shared(self.rank, self.size, nbytes, self.allgather_bytes, self._place.segment_directory)
        if mapping is None:
            return None
        # While this rank sleeps in the segment, nobody else would push what it has posted.
        return FlagSegment(self.rank, nbytes, mapping, self._bells, self._place.spin, self._drive, self._place.crowded)

    def shared_blocks(self, nbytes: int) -> list[NDArray[Any]] | None:
        if not self._all_can_ring:
            return None
        mapping = map_shared(self.rank, self.size, nbytes, self.allgather_bytes, self._place.segment_directory)
        return None if mapping is None else blocks_of(mapping, self.size, nbytes)

    def peer_memory(self) -> PeerMemory | None:
        return open_peer_memory(self.rank, self.allgather_bytes) if self._all_can_ring else None

    def abandon(self) -> None:
        if self.losses is not None:
            self.losses.release(self)
            self.losses.keep(self._control, self._data, self._outbox, self._arriving)
        self._bells.close()

    def survivors(self) -> MpiCommunicator:
        losses = self.losses
        assert losses is not None
        with as_communication_error("setting up the ranks that are left"):
            losses.shrink()
            losses.base.Set_errhandler(MPI.ERRORS_RETURN)
            members = self.translate(losses.base.Get_group())
            for rank in set(self.topology.local_ranks) - set(members):
                remove_left_behind(self._pids[rank], self._place.segment_directory)
            hosts, pids = [self.topology.hosts[rank] for rank in members], [self._pids[rank] for rank in members]
            control = _copy(losses.base, losses)
            return MpiCommunicator(control, tuple(hosts), self._place, losses, pids)

    def close(self) -> None:
        if self.losses is not None:
            self.losses.release(self)
        if not MPI.Is_finalized():
            while self._drive():  # what was posted last may not have left yet
                time.sleep(_SHORTEST_NAP)
            if self.losses is not None and self.losses.has_happened:
                self.losses.keep(self._control, self._data)  # as few calls of MPI as can be, after a loss
            else:
                self._data.Free()
                self._control.Free()
        self._bells.close()

    def abort(self, code: int) -> None:
        abort(code)


@dataclass(eq=False)
class _Arriving:
    """A control message, or a piece of one, whose bytes are still coming."""

    source: int
    is_last: bool
    buffer: bytearray
    request: MPI.Request


class MpiTransfer:
    """A data transfer, in one or more messages.

    Args:
        naps: wait as `_finish` does.
    """

    __slots__ = ("_losses", "_naps", "_requests", "_what")

    def __init__(self, requests: list[MPI.Request], naps: bool, losses: Losses | None, *what: Any) -> None:
        self._requests, self._naps, self._losses, self._what = requests, naps, losses, what

    def wait(self) -> None:
        with as_communication_error(*self._what):
            for request in self._requests:
                _finish(request, self._naps, self._losses)


def _finish(request: MPI.Request, naps: bool, losses: Losses | None) -> None:
    """Wait for `request`: `naps` in proportion to the wait instead of spinning as MPI does."""
    if losses is not None:
        _finish_or_leave(request, losses)
        return
    if not naps:
        request.Wait()
        return
    for _ in range(_TRANSFER_TESTS):
        if request.Test():
            return
    started = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - started
        time.sleep(min(max(waited * _NAP_SHARE, _SHORTEST_NAP), _EAGER_NAP))


def _finish_or_leave(request: MPI.Request, losses: Losses) -> None:
    """Wait for `request`, or leave it for ever once a rank is lost: a send must not be touched then."""
    started = time.monotonic()
    while not request.Get_status():
        try:
            losses.check()
        except CommunicationError:
            losses.keep(request)
            raise
        waited = time.monotonic() - started
        time.sleep(min(waited * _NAP_SHARE, _EAGER_NAP))
    losses.check()
    request.Wait()


def _allgather_bytes(comm: MPI.Intracomm, mine: bytes) -> list[bytes]:
    lengths = np.empty(comm.size, np.int64)
    comm.Allgather([np.array([len(mine)], np.int64), 1, MPI.INT64_T], [lengths, 1, MPI.INT64_T])
    counts = lengths.tolist()
    everything = np.empty(sum(counts), np.uint8)
    # One int of MPI counts the bytes of all ranks here: this is for set-up, not for data.
    comm.Allgatherv([np.frombuffer(mine, np.uint8), MPI.BYTE], [everything, counts, MPI.BYTE])
    ends = np.cumsum(lengths).tolist()
    return [everything[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]


class as_communication_error:
    """Turn MPI's exceptions within a `with` block into a `CommunicationError` that says `what` failed."""

    # A class in lower case, because it reads like a function, and costs a tenth of one made by contextlib.
    __slots__ = ("_what",)

    def __init__(self, *what: Any) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MPI.Exception):
            what = " ".join(map(str, self._what))
            text, number = error.Get_error_string(), error.Get_error_class()
            raise CommunicationError(f"{what} failed. MPI says: {text} (error class {number}).") from error
