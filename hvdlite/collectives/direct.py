"""Allreduce on one host without a copy into shared memory: every rank works on all ranks' tensors where they lie.

Each rank reduces its *slice* of the values: it gets the slice of every other rank, adds in rank order, and puts the
result into everybody's tensors. A rank enters, all wait until all have, and nobody returns before all are done:
so two waits, whatever the size, and the caller may write its tensors at once.

                                    bytes copied + bytes reduced per rank      S = buffer bytes, P = ranks
    in place (shared buffers)       S (P - 1) / P + S
    into shared buffers             2 S (P - 1) / P + S
    through the peers' memory       2 S (P - 1) / P + S

The other way, through blocks of shared memory, copies S and reduces P S, or copies 2 S and reduces S, in many
rounds with a wait each (`collectives/shared_memory.py`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.collectives.base import Array
from hvdlite.collectives.pack import aligned_empty, concatenate, distribute, offsets
from hvdlite.collectives.schedules import Part, chunks, split_aligned
from hvdlite.comm.arena import address_of
from hvdlite.comm.base import Communicator
from hvdlite.comm.peer_memory import MOST_ROWS, PeerMemory, Rows
from hvdlite.comm.shared import SharedSegment
from hvdlite.dtypes import ReduceOp
from hvdlite.kernels import Finish, Kernels

TABLE_BYTES = 64 * 1024  # of each rank, at the end of its block: where its tensors are
_LINE = 64  # bytes; slices start at multiples, so that no two ranks write one cache line
_ENTERED, _LEFT = 3, 4  # flag slots: how many of these operations this rank has begun, and done its slice of

# What is read at a time, of all ranks together: it stays in the L2 cache until it is written, and a system call
# more costs little. Measured with 2 ranks and 4 MiB: 64 KiB of each 857 us, 128 KiB 446, 256 KiB 383, 512 KiB 391.
_STEP_BYTES = 256 * 1024
_STEPS_BYTES = 1024 * 1024
MOST_TENSORS = TABLE_BYTES // 16
_LAYOUTS = 64  # remembered

# Tensors shorter than this on average are reduced as one run: a call less for each.
_FEW_ELEMENTS = 4096

How = tuple[ReduceOp, float, Finish]  # the operation, the factor before and what comes after
Otherwise = Callable[[Sequence[Array], Sequence[Array], How], None]


class Direct:
    """Both ways of one group on one host.

    Args:
        segment: whose flags 3 and 4, and whose blocks' last `TABLE_BYTES`, are for this object.
        peers: None where other ranks' memory cannot be touched; then only `in_place` works.
        step: bytes that are reduced at a time, at most.
    """

    def __init__(
        self, comm: Communicator, kernels: Kernels, segment: SharedSegment, peers: PeerMemory | None, step: int
    ) -> None:
        self._comm, self._kernels, self._segment, self._peers = comm, kernels, segment, peers
        me, size = comm.rank, comm.size
        self._others = [(me + k) % size for k in range(1, size)]  # each begins elsewhere
        self._tables = [segment.block(rank)[-TABLE_BYTES:].view(np.int64) for rank in range(size)]
        self._number = 0  # of operations so far; equal on all ranks
        self._layout_of = functools.lru_cache(_LAYOUTS)(self._make_layout)  # most steps are like the one before
        self.tune(step)

    def tune(self, step: int) -> None:
        """Reduce at most `step` bytes of each rank at once."""
        size = self._comm.size
        self._step = max(_LINE, min(step, _STEP_BYTES, _STEPS_BYTES // size) // _LINE * _LINE)
        rooms = [aligned_empty(self._step if self._peers else 0) for _ in range(size)]
        self._rooms = [(room, address_of(room)) for room in rooms]
        self._layout_of.cache_clear()

    def in_place(
        self,
        blocks: Sequence[Array],
        dtype: np.dtype[Any],
        starts: Sequence[int],
        lengths: Sequence[int],
        how: How,
        sources: Sequence[Array | None] = (),
    ) -> None:
        """Reduce values of `blocks`, the memory of each rank that all ranks see. See `SharedMemoryBackend`."""
        runs = _joined_runs(dtype.itemsize, starts, lengths)
        if not runs:
            return
        op, prescale, finish = how
        me, size = self._comm.rank, self._comm.size
        values = [block[: block.nbytes // dtype.itemsize * dtype.itemsize].view(dtype) for block in blocks]
        line, step = _LINE // dtype.itemsize, self._step // dtype.itemsize
        # Cut by what all ranks know: which values lie elsewhere is each rank's own affair.
        bounds = [[low + cut for cut in split_aligned(high - low, size, line)] for low, high in runs]
        elsewhere = [(at // dtype.itemsize, s) for at, s in zip(starts, sources, strict=False) if s is not None]
        elsewhere.sort(key=operator.itemgetter(0))
        for cuts in bounds if elsewhere else ():
            self._show(values[me], elsewhere, cuts[0], cuts[me])
            self._show(values[me], elsewhere, cuts[me + 1], cuts[-1])
        self._enter()
        for cuts in bounds:
            for low, high, source in _stretches(cuts[me], cuts[me + 1], elsewhere):
                for first, end in chunks(high - low, step):
                    parts = [value[low + first : low + end] for value in values]
                    terms, into = parts, parts[me]
                    if source is not None:
                        # What was just read is written at less cost than what is not in the cache.
                        terms, into = list(parts), parts[self._others[0]]
                        terms[me] = source[first:end]
                    self._kernels.fold(op, terms, into, prescale, finish)
                    for part in parts:
                        if part is not into:
                            part[:] = into
        self._leave()

    @staticmethod
    def _show(values: Array, elsewhere: Sequence[tuple[int, Array]], low: int, high: int) -> None:
        """Let others see what lies elsewhere and belongs between `low` and `high` of this rank's `values`."""
        for start, stop, source in _stretches(low, high, elsewhere):
            if source is not None:
                values[start:stop] = source

    def through_peers(self, sources: Sequence[Array], targets: Sequence[Array], how: How, otherwise: Otherwise) -> None:
        """Reduce `sources` into `targets`, as `Backend.allreduce`.

        Args:
            otherwise: does it on all ranks where the tensors of some rank are in memory that others cannot read, as
                that of devices is, or what a driver has pinned.
        """
        filled = [pair for pair in zip(sources, targets, strict=True) if pair[0].size]
        for first, end in chunks(len(filled), MOST_TENSORS):
            now, into = [source for source, _ in filled[first:end]], [target for _, target in filled[first:end]]
            done = self._one(now[0], into[0], how) if len(now) == 1 else self._many(now, into, how)
            if not done:  # and nobody has touched anything
                otherwise(now, into, how)

    def _one(self, source: Array, target: Array, how: How) -> bool:
        peers, me, size = self._peers, self._comm.rank, self._comm.size
        assert peers is not None
        op, prescale, finish = how
        dtype, itemsize = source.dtype, source.itemsize
        mine = [address_of(source), address_of(target)]
        self._tables[me][:2] = mine if peers.exposes(me, mine) else 0
        self._enter()
        where = [table[:2].tolist() for table in self._tables]
        if not all(place for place, _ in where):
            return False
        cuts = split_aligned(source.size, size, _LINE // itemsize)
        low, high = cuts[me], cuts[me + 1]
        for first, end in chunks(high - low, self._step // itemsize):
            shift, nbytes = (low + first) * itemsize, (end - first) * itemsize
            values, into = [source[low + first : low + end]] * size, target[low + first : low + end]
            for other in self._others:
                values[other], address = self._room(other, dtype, end - first)
                peers.read(other, where[other][0] + shift, address, nbytes)
            self._kernels.fold(op, values, into, prescale, finish)
            for other in self._others:
                peers.write(other, where[other][1] + shift, where[me][1] + shift, nbytes)
        self._leave()
        return True

    def _many(self, sources: Sequence[Array], targets: Sequence[Array], how: How) -> bool:
        peers, me, size, n = self._peers, self._comm.rank, self._comm.size, len(sources)
        assert peers is not None
        itemsize = sources[0].itemsize
        table = self._tables[me]
        mine = [address_of(source) for source in sources]
        if any(source is not target for source, target in zip(sources, targets, strict=True)):
            mine += [address_of(target) for target in targets]
            table[: 2 * n] = mine
        else:
            table[:n] = table[n : 2 * n] = mine
        if not peers.exposes(me, mine):
            table[0] = 0
        layout = self._layout_of(tuple([source.size for source in sources]), itemsize)
        self._enter()
        if not all(table[0] for table in self._tables):
            return False
        rows = [(layout.rows(table[:n]), layout.rows(table[n : 2 * n])) for table in self._tables]
        for piece in layout.pieces:
            cut, nbytes = slice(piece.first, piece.end), piece.length * itemsize
            values: list[Array] = [sources[0]] * size
            for other in self._others:
                values[other], address = self._room(other, sources[0].dtype, piece.length)
                peers.gather(other, rows[other][0][cut], address, nbytes)
            run = self._fold(piece, values, sources, targets, how)
            for other in self._others:
                peers.scatter(other, rows[other][1][cut], rows[me][1][cut] if run is None else run, nbytes)
        self._leave()
        return True

    def _fold(
        self, piece: _Piece, values: list[Array], sources: Sequence[Array], targets: Sequence[Array], how: How
    ) -> Rows | None:
        """Reduce a piece into `targets`. Returns where else the result is, in one run, if it is."""
        op, prescale, finish = how
        me = self._comm.rank
        own = [sources[part.tensor][part.start : part.stop] for part in piece.parts]
        into = [targets[part.tensor][part.start : part.stop] for part in piece.parts]
        if len(own) > 1 and piece.length < _FEW_ELEMENTS * len(own):
            run, address = self._room(me, own[0].dtype, piece.length)
            concatenate(own, run)
            values[me] = run
            self._kernels.fold(op, values, run, prescale, finish)
            distribute(run, into)
            return np.array([[address, run.nbytes]], np.int64)
        at = 0
        for source, target in zip(own, into, strict=True):
            parts = [value[at : at + source.size] for value in values]
            parts[me] = source
            self._kernels.fold(op, parts, target, prescale, finish)
            at += source.size
        return None

    def _make_layout(self, lengths: tuple[int, ...], itemsize: int) -> _Layout:
        return _Layout(lengths, itemsize, self._comm.rank, self._comm.size, self._step)

    def _room(self, rank: int, dtype: np.dtype[Any], length: int) -> tuple[Array, int]:
        """Return scratch for what is read of `rank`, and its address."""
        run, address = self._rooms[rank]
        return run[: length * dtype.itemsize].view(dtype), address

    def _enter(self) -> None:
        self._number += 1
        self._segment.publish(_ENTERED, self._number)
        self._segment.await_all(_ENTERED, self._number)

    def _leave(self) -> None:
        self._segment.publish(_LEFT, self._number)
        self._segment.await_all(_LEFT, self._number)


class _Piece(NamedTuple):
    """What is reduced at a time.

    Attributes:
        first, end: rows of the layout.
        length: elements.
        parts: of the tensors, in order.
    """

    first: int
    end: int
    length: int
    parts: list[Part]


class _Layout:
    """One rank's slice of tensors that are reduced together, cut into pieces of at most `step` bytes."""

    def __init__(self, lengths: Sequence[int], itemsize: int, rank: int, size: int, step: int) -> None:
        cuts = split_aligned(sum(lengths), size, _LINE // itemsize)
        low, high = cuts[rank], cuts[rank + 1]
        parts: list[Part] = []
        self.pieces: list[_Piece] = []
        first, room = 0, step // itemsize
        for tensor, (begin, length) in enumerate(zip(offsets(lengths), lengths, strict=False)):
            at, stop = max(low - begin, 0), min(high - begin, length)
            while at < stop:
                end = min(stop, at + room)
                parts.append(Part(tensor, at, end))
                room, at = room - (end - at), end
                if not room or len(parts) - first == MOST_ROWS:
                    first, room = self._close(first, parts), step // itemsize
        self._close(first, parts)
        self._tensors = np.array([part.tensor for part in parts], np.intp)
        self._starts = np.array([part.start * itemsize for part in parts], np.int64)
        self._nbytes = np.array([(part.stop - part.start) * itemsize for part in parts], np.int64)

    def rows(self, addresses: Array) -> Rows:
        """Return where the parts are, of tensors at `addresses`."""
        found = np.empty((len(self._tensors), 2), np.int64)
        np.add(addresses[self._tensors], self._starts, out=found[:, 0])
        found[:, 1] = self._nbytes
        return found

    def _close(self, first: int, parts: list[Part]) -> int:
        mine = parts[first:]
        if mine:
            self.pieces.append(_Piece(first, len(parts), sum(p.stop - p.start for p in mine), mine))
        return len(parts)


def _stretches(low: int, high: int, elsewhere: Sequence[tuple[int, Array]]) -> Iterator[tuple[int, int, Array | None]]:
    """Cut what lies between `low` and `high` where tensors begin and end whose values are elsewhere.

    Yields the first and last element, exclusive, and where its values are, or None.

    Args:
        elsewhere: first elements of such tensors, in order, and their values.
    """
    for begin, source in elsewhere:
        start, stop = max(low, begin), min(high, begin + source.size)
        if start >= stop:
            continue
        if low < start:
            yield low, start, None
        yield start, stop, source[start - begin : stop - begin]
        low = stop
    if low < high:
        yield low, high, None


def _joined_runs(itemsize: int, starts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last element, exclusive, of what lies in one piece. Neighbours become one run."""
    runs: list[tuple[int, int]] = []
    for start, length in sorted(zip(starts, lengths, strict=True)):
        low = start // itemsize
        if length and runs and runs[-1][1] == low:
            runs[-1] = (runs[-1][0], low + length)
        elif length:
            runs.append((low, low + length))
    return runs
