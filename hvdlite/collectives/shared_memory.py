"""All collectives among the ranks of one host, through memory that they share. No MPI at all.

Every collective is cut into rounds. In a round a rank *fills* its own block, waits until the others
have filled theirs, and *drains* what it needs from all blocks straight into the targets. A block
holds three rounds, so that filling round k + 1 hides the wait for round k, and a rank may be a round
ahead of another. Allreduce of large messages by more than two ranks has a step between the two: each
rank reduces its *slice* of everybody's values, and what is drained are the reduced slices. Short
messages and two ranks just *exchange* everything.

Where the kernel lets ranks copy between each other's tensors, and a trial shows that it does so fast, more than some
bytes go another way: allreduce that of `collectives/direct.py`, as does what lies in memory of all ranks anyway,
allgather and broadcast that of `copies.py`.

                          waits per round   bytes copied + bytes reduced per rank     P = ranks
    allreduce, exchange   1                 S + P S                                   S = buffer bytes
    allreduce, slices     2 (hidden)        2 S + S
    reducescatter         1 (hidden)        S (P - 1) / P + S
    allgather             1 (hidden)        S + P S                                   S = bytes of one rank
    broadcast, alltoall   1 (hidden)        2 S

Values are added in rank order in all of them, so that the bits depend neither on the way nor on how
tensors were fused. Memory: three pieces per rank, whatever the size of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.collectives.adasum import Adasum
from hvdlite.collectives.base import Array, Backend
from hvdlite.collectives.copies import Copies
from hvdlite.collectives.direct import TABLE_BYTES, Direct, How
from hvdlite.collectives.pack import Scratch, as_bytes, concatenate, distribute, offsets, total_length
from hvdlite.collectives.schedules import Part, chunks, pieces, split_aligned, within
from hvdlite.collectives.trial import fastest
from hvdlite.comm.base import Communicator
from hvdlite.comm.peer_memory import PeerMemory
from hvdlite.comm.shared import SharedSegment
from hvdlite.dtypes import SUPPORTED, ReduceOp, is_half
from hvdlite.kernels import NO_FINISH, Finish, Kernels
from hvdlite.messages import Knobs

_ROUNDS_HELD = 3  # rounds in a block: one being filled, one being drained, one for a rank that is late
_LINE = 64  # bytes; slices and areas start at multiples, so that no two ranks write one cache line
_FILLED, _REDUCED, _DRAINED = 0, 1, 2  # flag slots: how many rounds this rank has filled, …

# From this many bytes on, reading the peers' memory beats copies through blocks, where the kernel copies fast.
_DIRECT_BYTES = 128 * 1024
_TRIAL_BYTES, _MOST_TRIAL_BYTES = 4 * 2**20, 16 * 2**20  # tried with; more than the first where less goes by blocks

# Up to this many bytes read from others, reading them all costs less than a second wait does.
_EXCHANGE_BYTES = 64 * 1024
_EXCHANGE_BYTES_HALF = 16 * 1024  # half types pay for converting what they read

# Tensors shorter than this on average are reduced as one run, and copied out: a call less for each.
_FEW_ELEMENTS = 4096

Round = Callable[[int, int], None]  # called with the round and its place in the blocks


def segment_bytes(piece_bytes: int) -> int:
    """Return how much memory per rank the backend needs for pieces of `piece_bytes`."""
    return _ROUNDS_HELD * _whole_lines(piece_bytes) + TABLE_BYTES


class SharedMemoryBackend(Backend):
    """The ranks of one host.

    Args:
        segment: made by `comm.shared_segment(segment_bytes(piece_bytes))`; not closed here. A larger one
            leaves room for larger pieces (`tune`).
        piece_bytes: bytes of each rank in shared memory per round. Small enough that three fit into
            the cache, large enough that a round outlasts its waits.
        peers: the memory of the other ranks, where it may be touched.
        direct_bytes: from this size allreduce of two ranks goes through `peers`; of P ranks, from (P - 1)**2 times it.
            Allgather (the result) and broadcast do from 2 (P - 1)**3 times it. None: 128 KiB, and the first call that
            is large enough tries whether `peers` or blocks are faster on this machine; that holds from then on.
    """

    name = "shared_memory"

    def __init__(
        self,
        comm: Communicator,
        kernels: Kernels,
        segment: SharedSegment,
        piece_bytes: int,
        peers: PeerMemory | None = None,
        direct_bytes: int | None = None,
    ) -> None:
        super().__init__(comm, kernels)
        self._segment = segment
        self._set_piece(piece_bytes)
        self._rounds = 0  # of all calls so far; equal on all ranks
        self._views: dict[np.dtype[Any], list[list[Array]]] = {}
        self._scratch = Scratch()
        self._adasum = Adasum(comm, kernels)
        self._direct = Direct(comm, kernels, segment, peers, self._piece_bytes)
        self._peers_are_faster = None if direct_bytes is None else True  # None: nobody has tried
        least = _DIRECT_BYTES if direct_bytes is None else direct_bytes
        self._direct_bytes = math.inf if peers is None else least * (comm.size - 1) ** 2
        self._copies = None if peers is None else Copies(segment, peers)
        self._copy_bytes = 2 * least * (comm.size - 1) ** 3

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
        how = (op, prescale, finish)
        with np.errstate(all="ignore"):
            if length * sources[0].itemsize >= self._direct_bytes and self._peers_win():
                self._direct.through_peers(sources, targets, how, self._through_blocks)
            else:
                self._through_blocks(sources, targets, how)

    def _peers_win(self) -> bool:
        """Return whether the kernel copies between ranks fast enough; tries it the first time. All ranks call it."""
        if self._peers_are_faster is None:
            nbytes = min(max(_TRIAL_BYTES, self._direct_bytes), _MOST_TRIAL_BYTES)
            values = [np.full(int(nbytes) // 4, 0, np.float32)]  # written, so that no page is missing
            how = (ReduceOp.SUM, 1.0, NO_FINISH)

            def add_up(seconds: Array) -> None:
                self._through_blocks([seconds], [seconds], how)

            ways = (
                lambda: self._through_blocks(values, values, how),
                lambda: self._direct.through_peers(values, values, how, self._through_blocks),
            )
            self._peers_are_faster = fastest(ways, add_up) == 1
            winner = "straight between the ranks' tensors" if self._peers_are_faster else "through it as well"
            self.remark = f"; large ones {winner}, which was faster in a trial"
        return self._peers_are_faster

    def _through_blocks(self, sources: Sequence[Array], targets: Sequence[Array], how: How) -> None:
        length, dtype = total_length(sources), sources[0].dtype
        plain = how[1] == 1.0 and how[2].is_identity
        run = self._exchange if self._reads_all(length * dtype.itemsize, dtype, plain) else self._reduce_slices
        run(length, sources, targets, how)

    def allreduce_in_place(
        self,
        blocks: Sequence[Array],
        dtype: np.dtype[Any],
        starts: Sequence[int],
        lengths: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
        sources: Sequence[Array | None] = (),
    ) -> None:
        """Reduce values where they lie, in memory that all ranks see. No copy, and the bits that `allreduce` gives.

        Each rank reduces its slice of every block and writes the result into all of them. Nobody reads or
        writes a block any more once its rank returns.

        Args:
            blocks: flat uint8 memory of each rank (`Communicator.shared_blocks`).
            starts: byte at which each tensor begins, in every block; a multiple of the item's size.
            lengths: elements of each tensor.
            sources: of each tensor, flat, where this rank's values are if not in its block: only what other ranks
                reduce of them is copied there. Ranks may differ in this. None at all: all are in the block.
        """
        with np.errstate(all="ignore"):
            self._direct.in_place(blocks, dtype, starts, lengths, (op, prescale, finish), sources)

    def reducescatter(
        self,
        sources: Sequence[Array],
        counts: Sequence[Sequence[int]],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        if not any(source.size for source in sources):
            return
        me, size = self.comm.rank, self.comm.size
        dtype = sources[0].dtype
        blocks, starts = self._blocks(dtype), [offsets(count) for count in counts]
        area = self._area_bytes // dtype.itemsize
        # streams[r]: the rounds of what goes to rank r, all tensors one after the other.
        streams = [list(pieces([count[r] for count in counts], area)) for r in range(size)]

        def fill(k: int, place: int) -> None:
            for other in self._others():
                for part, at in _placed(streams[other], k, other * area):
                    shift = starts[part.tensor][other]
                    blocks[place][me][at : at + part.stop - part.start] = sources[part.tensor][
                        shift + part.start : shift + part.stop
                    ]

        def drain(k: int, place: int) -> None:
            for part, at in _placed(streams[me], k, me * area):
                shift = starts[part.tensor][me]
                values = [block[at : at + part.stop - part.start] for block in blocks[place]]
                values[me] = sources[part.tensor][shift + part.start : shift + part.stop]
                self.kernels.fold(op, values, _cut(targets[part.tensor], part), prescale, finish)

        with np.errstate(all="ignore"):
            self._run(max(map(len, streams)), fill, drain)

    def allgather(self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]) -> None:
        if self._copies is not None:
            total = sum(sum(count) * source.itemsize for count, source in zip(counts, sources, strict=True))
            if total >= self._copy_bytes and self._peers_win():
                self._copies.allgather(sources, counts, targets, self._gather)
                return
        self._gather(sources, counts, targets)

    def _gather(self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]) -> None:
        me, size = self.comm.rank, self.comm.size
        blocks = self._blocks(SUPPORTED["uint8"])
        raw_sources, raw_targets = [as_bytes(s) for s in sources], [as_bytes(t) for t in targets]
        nbytes = [[c * s.itemsize for c in count] for count, s in zip(counts, sources, strict=True)]
        starts = [offsets(lengths) for lengths in nbytes]
        streams = [list(pieces([lengths[r] for lengths in nbytes], self._piece_bytes)) for r in range(size)]

        def fill(k: int, place: int) -> None:
            for part, at in _placed(streams[me], k):
                blocks[place][me][at : at + part.stop - part.start] = _cut(raw_sources[part.tensor], part)

        def drain(k: int, place: int) -> None:
            for rank in range(size):
                for part, at in _placed(streams[rank], k):
                    shift = starts[part.tensor][rank]
                    value = (
                        _cut(raw_sources[part.tensor], part)
                        if rank == me
                        else blocks[place][rank][at : at + part.stop - part.start]
                    )
                    raw_targets[part.tensor][shift + part.start : shift + part.stop] = value

        self._run(max(map(len, streams)), fill, drain)

    def broadcast(self, array: Array, root: int) -> None:
        copies = self._copies if array.nbytes >= self._copy_bytes else None
        if copies is not None and self._peers_win() and copies.broadcast(array, root):
            return
        raw, blocks = as_bytes(array), self._blocks(SUPPORTED["uint8"])
        rounds = -(-raw.size // self._piece_bytes)

        def fill(k: int, place: int) -> None:
            if self.comm.rank == root:
                part = raw[k * self._piece_bytes : (k + 1) * self._piece_bytes]
                blocks[place][root][: part.size] = part

        def drain(k: int, place: int) -> None:
            if self.comm.rank != root:
                part = raw[k * self._piece_bytes : (k + 1) * self._piece_bytes]
                part[:] = blocks[place][root][: part.size]

        self._run(rounds, fill, drain, writer=root)

    def alltoall(self, source: Array, send: Sequence[int], target: Array, receive: Sequence[int]) -> None:
        me = self.comm.rank
        blocks, area = self._blocks(SUPPORTED["uint8"]), self._area_bytes
        leaving = offsets([count * source.itemsize for count in send])
        arriving = offsets([count * target.itemsize for count in receive])
        raw_source, raw_target = as_bytes(source), as_bytes(target)
        raw_target[arriving[me] : arriving[me + 1]] = raw_source[leaving[me] : leaving[me + 1]]

        def fill(k: int, place: int) -> None:
            for other in self._others():
                part = raw_source[leaving[other] : leaving[other + 1]][k * area : (k + 1) * area]
                blocks[place][me][other * area : other * area + part.size] = part

        def drain(k: int, place: int) -> None:
            for other in self._others():
                part = raw_target[arriving[other] : arriving[other + 1]][k * area : (k + 1) * area]
                part[:] = blocks[place][other][me * area : me * area + part.size]

        longest = max((leaving[other + 1] - leaving[other] for other in self._others()), default=0)
        self._run(self._largest(-(-longest // area)), fill, drain)

    def tune(self, knobs: Knobs) -> None:
        """Work with other pieces, as large as the segment has room for."""
        room = (self._segment.block(self.comm.rank).size - TABLE_BYTES) // _ROUNDS_HELD // _LINE * _LINE
        self._segment.barrier()  # the blocks move: nobody may read an old one any more
        self._set_piece(min(max(knobs.shared_memory_piece, _LINE * self.comm.size), room))
        self._direct.tune(self._piece_bytes)
        self._views.clear()

    def close(self) -> None:
        self._segment.barrier()  # nobody reads a block any more
        self._views.clear()
        self._scratch.clear()
        self._adasum.clear()

    def _set_piece(self, piece_bytes: int) -> None:
        self._piece_bytes = _whole_lines(piece_bytes)
        self._area_bytes = max(_LINE, self._piece_bytes // self.comm.size // _LINE * _LINE)
        if self._area_bytes * self.comm.size > self._piece_bytes:
            raise ValueError(
                f"a piece of {piece_bytes} bytes is too small for {self.comm.size} ranks: {_LINE} bytes each."
            )

    # Allreduce

    def _reads_all(self, nbytes: int, dtype: np.dtype[Any], plain: bool) -> bool:
        """True when every rank should read every value, which saves a wait, and not only its slice.

        What is chosen changes no bits.
        """
        if is_half(dtype):
            return nbytes * (self.comm.size - 1) <= _EXCHANGE_BYTES_HALF
        if self.comm.size == 2:
            # Both ways move the same bytes. Scaling everything on both ranks costs more than the wait
            # (102 MB in 161 tensors, averaged: 29 ms against 26).
            return plain or nbytes <= self._piece_bytes
        return nbytes * (self.comm.size - 1) <= _EXCHANGE_BYTES

    def _exchange(self, length: int, sources: Sequence[Array], targets: Sequence[Array], how: How) -> None:
        """Let every rank reduce everything.

        A round is reduced at once, while its sources are in the cache: filling the next one first, as
        `_run` does, hides the wait but made 4 MiB of two ranks 3 to 10 % slower.
        """
        segment, me = self._segment, self.comm.rank
        blocks = self._blocks(sources[0].dtype)
        for now, into in _cut_rounds(length, sources, targets, blocks[0][0].size):
            number = self._rounds = self._rounds + 1
            held = blocks[number % _ROUNDS_HELD]
            if number > _ROUNDS_HELD:
                segment.await_all(_DRAINED, number - _ROUNDS_HELD)
            concatenate(now, held[me])
            segment.publish(_FILLED, number)
            segment.await_all(_FILLED, number)
            self._fold_all(held, now, into, how)
            segment.publish(_DRAINED, number)

    def _fold_all(self, values: list[Array], sources: Sequence[Array], targets: Sequence[Array], how: How) -> None:
        """Reduce what the blocks hold of some tensors, one after the other, into `targets`."""
        op, prescale, finish = how
        me, length = self.comm.rank, total_length(targets)
        if len(targets) > 1 and length < _FEW_ELEMENTS * len(targets):
            fused = self._scratch.take("fused", values[0].dtype, length)
            self.kernels.fold(op, [block[:length] for block in values], fused, prescale, finish)
            distribute(fused, targets)
            return
        at = 0
        for source, target in zip(sources, targets, strict=True):
            end = at + source.size
            parts = [block[at:end] for block in values]
            parts[me] = source  # where it is in the cache anyway
            self.kernels.fold(op, parts, target, prescale, finish)
            at = end

    def _reduce_slices(self, length: int, sources: Sequence[Array], targets: Sequence[Array], how: How) -> None:
        """Let each rank reduce its slice of each piece, and collect the others' slices."""
        me, size = self.comm.rank, self.comm.size
        op, prescale, finish = how
        blocks = self._blocks(sources[0].dtype)
        rounds = list(pieces([source.size for source in sources], blocks[0][0].size))
        line = _LINE // blocks[0][0].itemsize
        bounds = [split_aligned(sum(p.stop - p.start for p in parts), size, line) for parts in rounds]

        def fill(k: int, place: int) -> None:
            mine, cuts = blocks[place][me], bounds[k]
            for low, high in ((0, cuts[me]), (cuts[me + 1], cuts[-1])):  # nobody reads my own slice
                for part, at in within(rounds[k], low, high):
                    mine[at : at + part.stop - part.start] = _cut(sources[part.tensor], part)

        def reduce(k: int, place: int) -> None:
            cuts = bounds[k]
            for part, at in within(rounds[k], cuts[me], cuts[me + 1]):
                values = [block[at : at + part.stop - part.start] for block in blocks[place]]
                result = values[me]
                values[me] = _cut(sources[part.tensor], part)
                self.kernels.fold(op, values, result, prescale, finish)
                _cut(targets[part.tensor], part)[:] = result

        def drain(k: int, place: int) -> None:
            cuts = bounds[k]
            for other in self._others():
                block = blocks[place][other]
                for part, at in within(rounds[k], cuts[other], cuts[other + 1]):
                    _cut(targets[part.tensor], part)[:] = block[at : at + part.stop - part.start]

        self._run(len(rounds), fill, drain, reduce)

    # Rounds

    def _run(
        self, n_rounds: int, fill: Round, drain: Round, reduce: Round | None = None, writer: int | None = None
    ) -> None:
        """Run the rounds of one collective.

        Filling round k needs that all have drained round k - 3, which had the same place. The order
        reduce k, fill k + 1, drain k puts work of this rank between any flag and the wait for it.

        Args:
            writer: the only rank that fills, if there is one.
        """
        segment, first = self._segment, self._rounds + 1
        self._rounds += n_rounds

        def start(k: int) -> None:
            number = first + k
            if number > _ROUNDS_HELD and (writer is None or writer == segment.rank):
                segment.await_all(_DRAINED, number - _ROUNDS_HELD)
            fill(k, number % _ROUNDS_HELD)
            segment.publish(_FILLED, number)

        if n_rounds:
            start(0)
        for k in range(n_rounds):
            number = first + k
            place = number % _ROUNDS_HELD
            if reduce is not None:
                segment.await_all(_FILLED, number)
                reduce(k, place)
                segment.publish(_REDUCED, number)
            if k + 1 < n_rounds:
                start(k + 1)
            if writer is not None:
                segment.await_rank(writer, _FILLED, number)
            else:
                segment.await_all(_FILLED if reduce is None else _REDUCED, number)
            drain(k, place)
            segment.publish(_DRAINED, number)

    def _largest(self, mine: int) -> int:
        """Return the largest `mine` of all ranks. Collective, one round."""
        blocks = self._blocks(SUPPORTED["int64"])
        found = [mine]

        def fill(k: int, place: int) -> None:
            blocks[place][self.comm.rank][0] = mine

        def drain(k: int, place: int) -> None:
            found.extend(int(block[0]) for block in blocks[place])

        self._run(1, fill, drain)
        return max(found)

    def _blocks(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """Return the memory of each place and rank, seen as `dtype`."""
        views = self._views.get(dtype)
        if views is None:
            views = self._views[dtype] = [
                [
                    self._segment.block(rank)[start : start + self._piece_bytes].view(dtype)
                    for rank in range(self.comm.size)
                ]
                for start in range(0, _ROUNDS_HELD * self._piece_bytes, self._piece_bytes)
            ]
        return views

    def _others(self) -> Iterator[int]:
        """Yield the other ranks, each rank beginning elsewhere, so that they do not all read one block."""
        for distance in range(1, self.comm.size):
            yield (self.comm.rank + distance) % self.comm.size


def _cut(array: Array, part: Part) -> Array:
    return array if part.stop - part.start == array.size else array[part.start : part.stop]


def _cut_rounds(
    length: int, sources: Sequence[Array], targets: Sequence[Array], capacity: int
) -> Iterator[tuple[Sequence[Array], Sequence[Array]]]:
    """Yield the sources and targets of each round of at most `capacity` elements. No copies."""
    if length <= capacity:
        yield sources, targets
        return
    if len(sources) == 1:
        for low, high in chunks(length, capacity):
            yield [sources[0][low:high]], [targets[0][low:high]]
        return
    for parts in pieces([source.size for source in sources], capacity):
        into = [_cut(targets[part.tensor], part) for part in parts]
        yield [_cut(sources[part.tensor], part) for part in parts], into


def _placed(stream: list[list[Part]], k: int, at: int = 0) -> Iterator[tuple[Part, int]]:
    """Yield the parts of round `k` with where they are in the block; nothing when the stream has ended."""
    for part in stream[k] if k < len(stream) else ():
        yield part, at
        at += part.stop - part.start


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
