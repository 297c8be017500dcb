"""Who sends what to whom in which step. Pure: numbers in, numbers out, no ranks, no memory.

Every rank computes its own steps from its rank and the size, so nothing has to be agreed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RingStep:
    """Send chunk `send` to the right while chunk `receive` comes from the left; then add it, or keep it."""

    send: int
    receive: int
    reduce: bool


@dataclass(frozen=True, slots=True)
class PairStep:
    """Exchange everything held with `partner`. Reduces means: combine what came with what is held."""

    partner: int
    sends: bool
    receives: bool
    reduces: bool


class Part(NamedTuple):
    """The elements start..stop of tensor number `tensor`. (A tuple: there can be hundreds in a call.)"""

    tensor: int
    start: int
    stop: int


def ring_steps(rank: int, size: int) -> Iterator[RingStep]:
    """Yield the steps of one rank's ring allreduce. After them every rank holds every chunk.

    Chunk `i` starts its tour at rank `i`, is complete at rank `i - 1`, and then makes a second
    tour that only copies.
    """
    yield from scatter_steps(rank, size)
    yield from gather_steps(rank, size, first=rank + 1)


def scatter_steps(rank: int, size: int) -> Iterator[RingStep]:
    """Yield the reducing half: afterwards rank `r` holds chunk `r + 1`, complete."""
    for k in range(size - 1):
        yield RingStep((rank - k) % size, (rank - k - 1) % size, reduce=True)


def gather_steps(rank: int, size: int, first: int) -> Iterator[RingStep]:
    """Yield the copying half, for a rank that starts with chunk `first` (its left neighbour with `first - 1`)."""
    for k in range(size - 1):
        yield RingStep((first - k) % size, (first - k - 1) % size, reduce=False)


def doubling_steps(rank: int, size: int) -> Iterator[PairStep]:
    """Yield the steps of recursive doubling: log2(size) exchanges, two more when size is no power of two.

    With p the largest power of two in `size`, ranks p.. first give their values to ranks 0.., and
    get the result at the end. Before exchange k the 2**k ranks of a block hold the same values.
    """
    power = largest_power_of_two(size)
    if rank >= power:
        yield PairStep(rank - power, sends=True, receives=False, reduces=False)
        yield PairStep(rank - power, sends=False, receives=True, reduces=False)
        return
    extra = rank + power
    if extra < size:
        yield PairStep(extra, sends=False, receives=True, reduces=True)
    distance = 1
    while distance < power:
        yield PairStep(rank ^ distance, sends=True, receives=True, reduces=True)
        distance *= 2
    if extra < size:
        yield PairStep(extra, sends=True, receives=False, reduces=False)


def binomial_parent_and_children(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return whom `rank` gets a broadcast from, and whom it sends it to, in order: the deepest subtree first."""
    place = (rank - root) % size
    lowest = place & -place if place else 1 << (size - 1).bit_length()
    parent = None if place == 0 else (rank - lowest) % size
    children = []
    distance = lowest >> 1
    while distance:
        if place + distance < size:
            children.append((rank + distance) % size)
        distance >>= 1
    return parent, children


def largest_power_of_two(size: int) -> int:
    """Return the largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)


def split_evenly(length: int, n_parts: int) -> list[int]:
    """Return the bounds of `n_parts` nearly equal runs: n_parts + 1 numbers, the longer runs first."""
    quotient, longer = divmod(length, n_parts)
    return [part * quotient + min(part, longer) for part in range(n_parts + 1)]


def split_aligned(length: int, n_parts: int, multiple: int) -> list[int]:
    """Return bounds as `split_evenly` does, but at multiples of `multiple`: no two parts share a cache line."""
    lines = split_evenly(-(-length // multiple), n_parts)
    return [min(line * multiple, length) for line in lines]


def chunks(length: int, capacity: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs of at most `capacity`; nothing for a length of 0."""
    for start in range(0, length, capacity):
        yield start, min(start + capacity, length)


def pieces(lengths: Sequence[int], capacity: int) -> Iterator[list[Part]]:
    """Cut the concatenation of tensors into pieces of exactly `capacity` elements; the last may be shorter.

    Empty tensors appear nowhere.
    """
    piece: list[Part] = []
    room = capacity
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            piece.append(Part(index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield piece
                piece, room = [], capacity
    if piece:
        yield piece


def within(parts: Sequence[Part], start: int, stop: int) -> Iterator[tuple[Part, int]]:
    """Yield what of a piece lies in its elements start..stop, with the offset of each part in the piece."""
    offset = 0
    for part in parts:
        end = offset + part.stop - part.start
        low, high = max(start, offset), min(stop, end)
        if low < high:
            shift = part.start - offset
            yield Part(part.tensor, low + shift, high + shift), low
        if end >= stop:
            return
        offset = end
