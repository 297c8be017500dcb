"""Where each rank of a set shows how far it has come in a schedule, and sees how far the others are.

One number per rank, which only grows: the era in its high bits, and how many leading batches the rank has submitted
whole. On one host it is a flag in shared memory; a rank that sleeps is woken by its bell. Between hosts it
travels as a message to every other rank, which takes one delay of the network; among many ranks it goes up a
tree, as the least of each subtree, and down again.

A message to every other rank can bring along what its sender gives to the batch: then all ranks have
everything that the batch needs once they know that it is due, and running it sends nothing.

    shared memory   1 store and P - 1 rings
    direct          P - 1 messages of 9 bytes, 1 delay                P = ranks, up to 16
    tree            2 messages per edge, 2 log8(P) delays
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdlite.comm.base import Communicator
from hvdlite.comm.shared import SharedSegment
from hvdlite.messages import encode_counter

Array = NDArray[Any]

_ERA = 2**40  # one more in the high bits
_SLOT = 0  # flag of the segment
_CELL_SLOT = 1  # flag of the first cell: which batch it holds
_CELLS = 4  # of each rank: two for each of two eras
_CELL_BYTES = 512 * 1024  # of all other ranks together: reading more of them takes longer than more waits
_LEAST_CELL = 1024
_VIEWS = 256  # remembered
_MOST_DIRECT = 16  # ranks
_BRANCHES = 8


class Board(Protocol):
    """One rank's view. `publish` may be called by any thread, one at a time, if `any_thread`.

    Attributes:
        carries: batches may be enclosed with a number, where it is a message to each rank.
        peers: who sends messages to this rank's board.
        most_shown: how many bytes of values may go with a number; negative for none at all.
    """

    any_thread: bool
    carries: bool
    peers: Sequence[int]
    most_shown: int

    def begin(self) -> None:
        """A new era begins. Every rank calls this for each of them, before it publishes anything of it."""

    def show(self, era: int, position: int, values: Array) -> None:
        """Show what this rank gives to batch `position`, just before it publishes `position + 1`.

        Only once it has run all batches before that one, of which the last needed something of every rank: so all
        have run what came before it, and read what was shown for that.

        Args:
            values: flat, at most `most_shown` bytes.
        """

    def shown(self, era: int, position: int, dtype: np.dtype[Any], n: int) -> list[Array] | None:
        """Return the values that the ranks have shown for batch `position`, which all have published, in rank order.

        None, on all ranks alike, if one of them has not. They may be read until this rank has run the batch.
        """

    def publish(self, era: int, counter: int, enclosed: bytes = b"") -> None:
        """Show that this rank has submitted the first `counter` batches of `era`.

        Args:
            enclosed: what it gives to the last of them, if the board `carries`; else nothing.
        """

    def reached(self, era: int, position: int) -> bool:
        """Return whether every other rank has submitted batch number `position` of `era`."""

    def glimpse(self, era: int, position: int) -> bool:
        """`reached`, after a short spin where that helps."""

    def hear(self, source: int, value: int, enclosed: bytes = b"") -> None:
        """Take in a message of another rank's board."""

    def has_enclosed(self, era: int, position: int) -> bool:
        """Return whether what every other rank gives to batch `position` of `era` has come."""

    def take_enclosed(self, era: int, position: int) -> dict[int, bytes]:
        """Return it, by rank, and forget it and what was given to batches before it."""

    def close(self) -> None:
        """Give memory back."""


class SharedBoard:
    """The ranks of one host. `segment` is this board's own, and has room for `_CELLS` cells of `cell_bytes` each.

    A cell is written again two batches later. By then every rank has read it: it has begun the batch in between,
    which this rank could not have run without it. A number alone would not say so: another thread of a rank may submit
    the next batch before the rank has run this one. Across eras this holds for one batch only, so they take turns
    with two pairs of cells.
    """

    any_thread, carries = True, False
    peers: Sequence[int] = ()

    def __init__(self, comm: Communicator, segment: SharedSegment, cell_bytes: int) -> None:
        self._comm, self._segment, self.most_shown = comm, segment, cell_bytes
        self._others = [(comm.rank + k) % comm.size for k in range(1, comm.size)]
        self._pair = 0
        self._views: dict[tuple[np.dtype[Any], int], list[list[Array]]] = {}  # of each cell, of each rank

    def begin(self) -> None:
        self._pair ^= 2

    def show(self, era: int, position: int, values: Array) -> None:
        cell = self._pair | position & 1
        self._view(values.dtype, values.size)[cell][self._comm.rank][:] = values
        self._segment.put(_CELL_SLOT + cell, era * _ERA + position + 1)

    def shown(self, era: int, position: int, dtype: np.dtype[Any], n: int) -> list[Array] | None:
        cell = self._pair | position & 1
        if not self._segment.all_show(_CELL_SLOT + cell, era * _ERA + position + 1):
            return None
        return self._view(dtype, n)[cell]

    def _view(self, dtype: np.dtype[Any], n: int) -> list[list[Array]]:
        views = self._views.get((dtype, n))
        if views is None:
            if len(self._views) == _VIEWS:
                self._views.clear()
            nbytes = n * dtype.itemsize
            views = self._views[dtype, n] = [
                [self._segment.block(rank)[start : start + nbytes].view(dtype) for rank in range(self._comm.size)]
                for start in range(0, _CELLS * self.most_shown, self.most_shown)
            ]
        return views

    def publish(self, era: int, counter: int, enclosed: bytes = b"") -> None:
        self._segment.put(_SLOT, era * _ERA + counter)
        for rank in self._others:
            self._comm.ring(rank)

    def reached(self, era: int, position: int) -> bool:
        # What shows a later era has left this one for good, and says nothing of it.
        peek, least = self._segment.peek, era * _ERA + position
        last = (era + 1) * _ERA
        return all(least < peek(rank, _SLOT) < last for rank in self._others)

    def glimpse(self, era: int, position: int) -> bool:
        segment, value, last = self._segment, era * _ERA + position + 1, (era + 1) * _ERA
        for rank in self._others:  # noqa: SIM110  a generator takes twice as long
            if not (segment.glimpse(rank, _SLOT, value) and segment.peek(rank, _SLOT) < last):
                return False
        return True

    def hear(self, source: int, value: int, enclosed: bytes = b"") -> None:
        raise AssertionError(f"set rank {source} sent its counter, although it shows it in shared memory")

    def has_enclosed(self, era: int, position: int) -> bool:
        return False

    def take_enclosed(self, era: int, position: int) -> dict[int, bytes]:
        raise AssertionError(f"batch {position} of era {era} is enclosed, although the ranks share memory")

    def close(self) -> None:
        self._segment.close()


class MessageBoard:
    """Ranks that share no memory, and a rank that is alone."""

    any_thread = False
    most_shown = -1

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        rank, size = comm.rank, comm.size
        self._is_tree = size > _MOST_DIRECT
        self.carries = not self._is_tree
        self._enclosed: dict[int, dict[int, bytes]] = {}  # by value of the counter that it came with, and rank
        self._parent = (rank - 1) // _BRANCHES if self._is_tree and rank else None
        first = rank * _BRANCHES + 1
        below = range(first, min(first + _BRANCHES, size)) if self._is_tree else [r for r in range(size) if r != rank]
        self._heard = dict.fromkeys(below, 0)
        self.peers: Sequence[int] = [*below, *([] if self._parent is None else [self._parent])]
        self._mine = 0
        self._told_up = 0
        self._everyone = 0  # tree only: least of all ranks, as the root says

    def begin(self) -> None:
        pass

    def show(self, era: int, position: int, values: Array) -> None:
        raise AssertionError(f"{values.nbytes} bytes do not go with a number")

    def shown(self, era: int, position: int, dtype: np.dtype[Any], n: int) -> list[Array] | None:
        return None

    def publish(self, era: int, counter: int, enclosed: bytes = b"") -> None:
        self._mine = era * _ERA + counter
        if self._is_tree:
            self._pass_on()
            return
        message = encode_counter(self._mine, enclosed)
        for rank in self._heard:
            self._comm.post(rank, message)

    def reached(self, era: int, position: int) -> bool:
        least, last = era * _ERA + position, (era + 1) * _ERA
        if self._is_tree:
            return least < self._everyone < last
        return all(least < value < last for value in self._heard.values())

    glimpse = reached

    def hear(self, source: int, value: int, enclosed: bytes = b"") -> None:
        if enclosed:
            self._enclosed.setdefault(value, {})[source] = enclosed
        if source == self._parent:
            self._tell_down(value)
            return
        self._heard[source] = value
        if self._is_tree:
            self._pass_on()

    def has_enclosed(self, era: int, position: int) -> bool:
        return len(self._enclosed.get(era * _ERA + position + 1, ())) == len(self._heard)

    def take_enclosed(self, era: int, position: int) -> dict[int, bytes]:
        found = self._enclosed.pop(era * _ERA + position + 1, {})
        assert len(found) == len(self._heard), f"batch {position} of era {era} is run before all of it has come"
        # What is older was given to batches that were never run: their schedule has ended.
        for value in [value for value in self._enclosed if value <= era * _ERA + position]:
            del self._enclosed[value]
        return found

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
    if not shared_memory or comm.size == 1:
        return MessageBoard(comm)
    for cell_bytes in (max(_LEAST_CELL, _CELL_BYTES // (comm.size - 1) // 64 * 64), 0):
        segment = comm.shared_segment(_CELLS * cell_bytes)
        if segment is not None:
            return SharedBoard(comm, segment, cell_bytes)
    return MessageBoard(comm)
