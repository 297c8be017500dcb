"""Where each rank of a set shows how far it has come in a schedule, and sees how far the others are.

One number per rank, which only grows: the era in its high bits, and how many leading batches the rank has submitted
whole. On one host it is a flag in shared memory; a rank that sleeps is woken by its bell. Between hosts it
travels as a message to every other rank, which takes one delay of the network; among many ranks it goes up a
tree, as the least of each subtree, and down again.

    shared memory   1 store and P - 1 rings
    direct          P - 1 messages of 9 bytes, 1 delay                P = ranks, up to 16
    tree            2 messages per edge, 2 log8(P) delays
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdlite.comm.base import Communicator
from hvdlite.comm.shared import SharedSegment
from hvdlite.messages import encode_counter

_ERA = 2**40  # one more in the high bits
_SLOT = 0  # flag of the segment
_MOST_DIRECT = 16  # ranks
_BRANCHES = 8


class Board(Protocol):
    """One rank's view. `publish` may be called by any thread, one at a time, if `any_thread`."""

    any_thread: bool
    peers: Sequence[int]  # who sends messages to this rank's board

    def publish(self, era: int, counter: int) -> None:
        """Show that this rank has submitted the first `counter` batches of `era`."""

    def reached(self, era: int, position: int) -> bool:
        """Return whether every other rank has submitted batch number `position` of `era`."""

    def glimpse(self, era: int, position: int) -> bool:
        """`reached`, after a short spin where that helps."""

    def hear(self, source: int, value: int) -> None:
        """Take in a message of another rank's board."""

    def close(self) -> None:
        """Give memory back."""


class SharedBoard:
    """The ranks of one host. `segment` is this board's own."""

    any_thread = True
    peers: Sequence[int] = ()

    def __init__(self, comm: Communicator, segment: SharedSegment) -> None:
        self._comm, self._segment = comm, segment
        self._others = [(comm.rank + k) % comm.size for k in range(1, comm.size)]

    def publish(self, era: int, counter: int) -> None:
        self._segment.put(_SLOT, era * _ERA + counter)
        for rank in self._others:
            self._comm.ring(rank)

    def reached(self, era: int, position: int) -> bool:
        # What shows a later era has left this one for good, and says nothing of it.
        peek, least = self._segment.peek, era * _ERA + position
        last = (era + 1) * _ERA
        return all(least < peek(rank, _SLOT) < last for rank in self._others)

    def glimpse(self, era: int, position: int) -> bool:
        glimpse, value = self._segment.glimpse, era * _ERA + position + 1
        return all(glimpse(rank, _SLOT, value) for rank in self._others) and self.reached(era, position)

    def hear(self, source: int, value: int) -> None:
        raise AssertionError(f"set rank {source} sent its counter, although it shows it in shared memory")

    def close(self) -> None:
        self._segment.close()


class MessageBoard:
    """Ranks that share no memory, and a rank that is alone."""

    any_thread = False

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        rank, size = comm.rank, comm.size
        self._is_tree = size > _MOST_DIRECT
        self._parent = (rank - 1) // _BRANCHES if self._is_tree and rank else None
        first = rank * _BRANCHES + 1
        below = range(first, min(first + _BRANCHES, size)) if self._is_tree else [r for r in range(size) if r != rank]
        self._heard = dict.fromkeys(below, 0)
        self.peers: Sequence[int] = [*below, *([] if self._parent is None else [self._parent])]
        self._mine = 0
        self._told_up = 0
        self._everyone = 0  # tree only: least of all ranks, as the root says

    def publish(self, era: int, counter: int) -> None:
        self._mine = era * _ERA + counter
        if self._is_tree:
            self._pass_on()
            return
        message = encode_counter(self._mine)
        for rank in self._heard:
            self._comm.post(rank, message)

    def reached(self, era: int, position: int) -> bool:
        least, last = era * _ERA + position, (era + 1) * _ERA
        if self._is_tree:
            return least < self._everyone < last
        return all(least < value < last for value in self._heard.values())

    glimpse = reached

    def hear(self, source: int, value: int) -> None:
        if source == self._parent:
            self._tell_down(value)
            return
        self._heard[source] = value
        if self._is_tree:
            self._pass_on()

    def close(self) -> None:
        pass

    def _pass_on(self) -> None:
        least = min([self._mine, *self._heard.values()])
        if self._parent is None:
            if least > self._everyone:
                self._tell_down(least)
        elif least > self._told_up:
            self._told_up = least
            self._comm.post(self._parent, encode_counter(least))

    def _tell_down(self, value: int) -> None:
        self._everyone = value
        for rank in self._heard:
            self._comm.post(rank, encode_counter(value))


def open_board(comm: Communicator, shared_memory: bool) -> Board:
    """Return the board of a set. Collective over it.

    Args:
        shared_memory: whether shared memory may be used; equal on all ranks.
    """
    segment = comm.shared_segment(0) if shared_memory and comm.size > 1 else None
    return MessageBoard(comm) if segment is None else SharedBoard(comm, segment)
