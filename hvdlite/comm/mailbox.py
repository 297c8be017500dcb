"""Short control messages between the ranks of one host, through shared memory.

Every ordered pair of ranks has a ring of slots, with one writer and one reader. A message that is
too long, or finds no free slot, goes by another way (MPI). All messages of a pair are numbered, so that
the reader gets them in order whichever way they came.

    post 1.5 us, take 1 us, a look for nothing 0.3 us per rank of the host     (MPI: 5, 4 and 1 us)

Memory: 2 KiB for each pair.
"""

from __future__ import annotations

import mmap
import platform

from hvdlite.comm.doorbell import STRONG_ORDER, Fence

_SLOTS = 8
_SLOT_BYTES = 256
_HEAD_BYTES = 16  # the message's number and length, int64 each
LONGEST = _SLOT_BYTES - _HEAD_BYTES
_RING_BYTES = _SLOTS * _SLOT_BYTES
_PAIR_BYTES = _RING_BYTES + 16  # and two counters: messages read, messages sent the other way
_MOST_RANKS = 32  # 2 MiB; beyond that, MPI carries everything


def mailbox_bytes(size: int) -> int:
    """Return the bytes that each rank's block needs, or 0 where there are too many ranks for mailboxes."""
    return size * _PAIR_BYTES if 1 < size <= _MOST_RANKS else 0


class _Pair:
    """Where things of one ordered pair of ranks are, in words and bytes of the mapping."""

    __slots__ = ("count", "elsewhere", "read", "ring")

    def __init__(self, first: int, stride: int, writer: int, reader: int) -> None:
        self.ring = first + reader * stride + writer * _PAIR_BYTES
        self.read = (self.ring + _RING_BYTES) // 8  # written by the reader
        self.elsewhere = self.read + 1  # written by the writer
        self.count = 0  # messages sent, at the writer; delivered, at the reader


class Mailboxes:
    """One rank's view of all mailboxes.

    Args:
        mapping: memory that all ranks see, zeroed.
        first: where the block of rank 0 begins in it, and `stride` how far the blocks are apart.
    """

    def __init__(self, rank: int, size: int, mapping: mmap.mmap, first: int, stride: int) -> None:
        self._bytes = memoryview(mapping)
        self._words = self._bytes.cast("q")
        others = [(rank + k) % size for k in range(1, size)]
        self._leaving = {dest: _Pair(first, stride, rank, dest) for dest in others}
        self._arriving = {source: _Pair(first, stride, source, rank) for source in others}
        self._fetched = dict.fromkeys(others, 0)  # messages that have come the other way
        self._early: dict[tuple[int, int], bytes] = {}  # those of them whose turn has not come, by source and number
        self._fence = Fence()
        self._weak = platform.machine() not in STRONG_ORDER

    def post(self, dest: int, message: bytes) -> int:
        """Put `message` down for `dest` and return 0, or return the number under which it must go the other way."""
        pair, words = self._leaving[dest], self._words
        pair.count = number = pair.count + 1
        if len(message) > LONGEST or number - words[pair.read] > _SLOTS:
            words[pair.elsewhere] += 1
            return number
        at = pair.ring + number % _SLOTS * _SLOT_BYTES
        words[(at >> 3) + 1] = len(message)
        self._bytes[at + _HEAD_BYTES : at + _HEAD_BYTES + len(message)] = message
        if self._weak:
            self._fence()  # the slot is full before it has its number
        words[at >> 3] = number
        return 0

    def take(self) -> tuple[int, bytes | None] | None:
        """Return the next message of some rank as (source, message), or None if there is none.

        (source, None) if one of its messages has to be fetched the other way first.
        """
        words = self._words
        for source, pair in self._arriving.items():
            number = pair.count + 1
            at = pair.ring + number % _SLOTS * _SLOT_BYTES
            if words[at >> 3] == number:
                if self._weak:
                    self._fence()
                message = bytes(self._bytes[at + _HEAD_BYTES : at + _HEAD_BYTES + words[(at >> 3) + 1]])
            elif self._early and (source, number) in self._early:
                message = self._early.pop((source, number))
            elif words[pair.elsewhere] > self._fetched[source]:
                return source, None
            else:
                continue
            pair.count = number
            if self._weak:
                self._fence()  # it has been copied before its slot is free
            words[pair.read] = number
            return source, message
        return None

    def hand_in(self, source: int, number: int, message: bytes) -> None:
        """Put a message of `source` in its place that has come the other way under `number`."""
        self._early[source, number] = message
        self._fetched[source] += 1
