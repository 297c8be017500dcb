"""The contract of a Communicator: a group of ranks that can exchange bytes.

Two planes share it. *Control* messages are small, asynchronous and ordered
between each pair of ranks; they carry negotiation. *Data* transfers block and are
made by one thread (the engine's) in an order on which all ranks agreed before.
Every implementation passes tests/conformance/test_communicator.py.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from hvdlite.comm.losses import Losses
from hvdlite.comm.peer_memory import PeerMemory
from hvdlite.comm.shared import SharedSegment
from hvdlite.errors import CommunicationError
from hvdlite.topology import Topology


class Transfer(Protocol):
    """A data transfer under way."""

    def wait(self) -> None:
        """Return when the buffer may be used again. Raises `CommunicationError`."""


class Communicator(abc.ABC):
    """A group of ranks. Numbers of ranks in its methods count within the group.

    Attributes:
        rank, size: this process' place in the group, and how many there are.
        topology: who sits on which host; the same value on all ranks.
        any_threads: several threads may use groups at the same time; one group still belongs to one of them at a time.
        losses: what is known of lost ranks; None where a lost rank ends the job, or all of the job is this process.
    """

    rank: int
    size: int
    topology: Topology
    any_threads: bool = True
    losses: Losses | None = None

    # Control plane. `post`, `poll` and `wait` belong to the engine thread, `wake` and `ring` to anyone.

    @abc.abstractmethod
    def post(self, dest: int, message: bytes) -> None:
        """Send `message` to `dest` (another rank, not this one) and return at once, without waiting for it to be read.

        Messages between two ranks arrive in the order in which they were posted. Any length.
        Wakes `dest` if it sleeps in `wait`.
        """

    @abc.abstractmethod
    def poll(self) -> tuple[int, bytes] | None:
        """Return the next message as (source, bytes), or None when none is here now."""

    @abc.abstractmethod
    def wait(self, timeout: float, eager: bool = False) -> None:
        """Sleep until a message may have come, `wake()` was called, or `timeout` seconds passed.

        May return early. A `wake()` or a message that came before the call ends it at once.
        Costs no CPU while sleeping, beyond a slow poll where a rank on another host cannot ring.
        Each group has bells of its own, so that several threads may each serve one group.

        Args:
            timeout: longest sleep, seconds; `math.inf` is allowed.
            eager: a message is expected within microseconds. Spin shortly before sleeping, and look
                often for ranks that cannot ring. Leave it False while idle: spinning holds the GIL.
        """

    @abc.abstractmethod
    def wake(self) -> None:
        """End this rank's current or next `wait`. From any thread; never blocks."""

    @abc.abstractmethod
    def ring(self, dest: int) -> None:
        """End the current or next `wait` of `dest`, a rank of the same host. From any thread; never blocks."""

    # Data plane. Arrays are one-dimensional and C-contiguous, of a dtype in `dtypes.SUPPORTED`;
    # both sides pass the same length. Zero lengths are allowed. Over 2**31 bytes works.

    @abc.abstractmethod
    def isend(self, array: NDArray[Any], dest: int) -> Transfer: ...

    @abc.abstractmethod
    def irecv(self, array: NDArray[Any], source: int) -> Transfer: ...

    def send(self, array: NDArray[Any], dest: int) -> None:
        self.isend(array, dest).wait()

    def recv(self, array: NDArray[Any], source: int) -> None:
        self.irecv(array, source).wait()

    def sendrecv(self, outgoing: NDArray[Any], dest: int, incoming: NDArray[Any], source: int) -> None:
        """Send and receive at the same time. Either side may be this rank itself if both are."""
        arriving = self.irecv(incoming, source)
        leaving = self.isend(outgoing, dest)
        arriving.wait()
        leaving.wait()

    # Set-up. Collective over the group; called while no other thread uses the group.

    @abc.abstractmethod
    def allgather_bytes(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes in rank order. Collective. Lengths may differ."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return once every rank has entered. Collective."""

    @abc.abstractmethod
    def exit_barrier(self, timeout: float = math.inf) -> bool:
        """`barrier` for the end of a job: costs no CPU while others are late. Collective.

        Returns:
            False when some rank had not entered after `timeout` seconds; the group is then unusable.
        """

    @abc.abstractmethod
    def create(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a new group of `ranks` (of this group, in that order), or None on the others. Collective."""

    @abc.abstractmethod
    def shared_segment(self, nbytes: int) -> SharedSegment | None:
        """Return memory that all ranks of the group see, `nbytes` for each rank, zeroed. Collective.

        None, on every rank alike, when the group spans hosts or the host has no room for it.
        """

    @abc.abstractmethod
    def shared_blocks(self, nbytes: int) -> list[NDArray[Any]] | None:
        """Return a flat uint8 block of `nbytes` for each rank, zeroed, 4096-byte aligned, seen by all. Collective.

        None, on every rank alike, as for `shared_segment`. The memory goes when the last array over it does.
        """

    @abc.abstractmethod
    def peer_memory(self) -> PeerMemory | None:
        """Return access to the memory of all ranks of the group. Collective.

        None, on every rank alike, when the group spans hosts or the system does not allow it.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give the group's resources back. Collective; nothing may be in flight."""

    def abandon(self) -> None:
        """Give back what costs no word with other ranks, some of which are lost. Nobody uses the group any more."""
        return

    def survivors(self) -> Communicator:
        """Return the group of the ranks that are left. Collective over them. For groups with `losses` only.

        Called again, also if it failed because still more ranks were lost, it leaves those out, too.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def abort(self, code: int) -> None:
        """End all ranks of the job now, with exit status `code`. Does not return under MPI."""

    def agree_on_members(self, ranks: Sequence[int]) -> list[int]:
        """Check the argument of `create` on all ranks, and return it. Collective. Raises on all ranks or on none."""
        asked = [list(map(int, text.split())) for text in self.allgather_bytes(" ".join(map(str, ranks)).encode())]
        for rank, other in enumerate(asked):
            if other != asked[0]:
                raise CommunicationError(
                    f"the ranks want to create different groups: {asked[0]} on rank 0, {other} on rank {rank}."
                )
        members = asked[0]
        if len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members) or not members:
            raise ValueError(f"a group needs distinct ranks from 0 to {self.size - 1}, at least one: {members}.")
        return members

    # Optional: MPI's own collectives, the yardstick and the fallback.

    @property
    def native(self) -> Any:
        """The `comm.mpi.NativeCollectives` of this group, or None where there is no MPI."""
        return None
