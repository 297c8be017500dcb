"""Allgather and broadcast on one host by single copies between the ranks' tensors, without a block in between.

A rank enters, all wait until all have, and nobody returns before all are done, as in `collectives/direct.py`.

                 bytes copied per rank      P = ranks
    allgather    S P                        S = bytes of one rank
    broadcast    S (P - 1) / P              S = bytes of the array
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdlite.collectives.base import Array
from hvdlite.collectives.direct import MOST_TENSORS, TABLE_BYTES
from hvdlite.collectives.pack import as_bytes, offsets
from hvdlite.collectives.schedules import chunks, split_aligned
from hvdlite.comm.arena import address_of
from hvdlite.comm.peer_memory import PeerMemory
from hvdlite.comm.shared import SharedSegment

_PAGE = 4096
_ENTERED, _LEFT = 5, 6  # flag slots: how many of these operations this rank has begun, and done its part of
_NOWHERE = 1  # where nothing is read
_MOST_BYTES = 2**30  # of one system call, which copies less than 2 GiB

Otherwise = Callable[[Sequence[Array], Sequence[Sequence[int]], Sequence[Array]], None]


class Copies:
    """Collectives of one group that only copy.

    Args:
        segment: whose flags 5 and 6 are for this object; the tables at the end of its blocks are shared with `Direct`.
    """

    def __init__(self, segment: SharedSegment, peers: PeerMemory) -> None:
        self._segment, self._peers = segment, peers
        me, size = segment.rank, segment.size
        self._others = [(me + k) % size for k in range(1, size)]  # each begins elsewhere
        self._tables = [segment.block(rank)[-TABLE_BYTES:].view("q") for rank in range(size)]
        self._number = 0  # of operations so far; equal on all ranks

    def allgather(
        self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array], otherwise: Otherwise
    ) -> None:
        """See `Backend.allgather`.

        Args:
            otherwise: does it on all ranks where the arrays of some rank are in memory that others cannot read.
        """
        me = self._segment.rank
        for first, end in chunks(len(sources), MOST_TENSORS):
            mine, sizes, into = sources[first:end], counts[first:end], targets[first:end]
            places = [address_of(source) if source.size else _NOWHERE for source in mine]
            self._tables[me][: len(places)] = places
            if not self._peers.exposes(me, [address_of(array) for array in (*mine, *into) if array.size]):
                self._tables[me][0] = 0
            if not self._enter():
                otherwise(mine, sizes, into)
                continue
            for number, (source, target) in enumerate(zip(mine, into, strict=True)):
                starts = [start * source.itemsize for start in offsets(sizes[number])]
                at = address_of(target)
                for other in self._others:
                    theirs, nbytes = int(self._tables[other][number]), starts[other + 1] - starts[other]
                    self._read(other, theirs, at + starts[other], nbytes)
                as_bytes(target)[starts[me] : starts[me + 1]] = as_bytes(source)
            self._leave()

    def broadcast(self, array: Array, root: int) -> bool:
        """See `Backend.broadcast`. The root writes as much as each of the others reads.

        False, on all ranks, and nothing is done, where the array of some rank is in memory that others cannot read.
        """
        segment, at = self._segment, address_of(array)
        self._tables[segment.rank][0] = at if self._peers.exposes(segment.rank, [at]) else 0
        cut = split_aligned(array.nbytes, segment.size, _PAGE)[-2]
        if not self._enter():
            return False
        if segment.rank != root:
            self._read(root, int(self._tables[root][0]), at, cut)
        else:
            for other in self._others:
                theirs = int(self._tables[other][0])
                for low, high in chunks(array.nbytes - cut, _MOST_BYTES):
                    self._peers.write(other, theirs + cut + low, at + cut + low, high - low)
        self._leave()
        return True

    def _read(self, rank: int, theirs: int, mine: int, nbytes: int) -> None:
        for low, high in chunks(nbytes, _MOST_BYTES):
            self._peers.read(rank, theirs + low, mine + low, high - low)

    def _enter(self) -> bool:
        """Wait until all have entered. False if some rank's memory cannot be read."""
        self._number += 1
        self._segment.publish(_ENTERED, self._number)
        self._segment.await_all(_ENTERED, self._number)
        return all(table[0] for table in self._tables)

    def _leave(self) -> None:
        self._segment.publish(_LEFT, self._number)
        self._segment.await_all(_LEFT, self._number)
