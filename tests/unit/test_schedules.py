"""Schedules are run on paper here: sets of contributions instead of arrays."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hvdlite.collectives.schedules import (
    Part,
    binomial_parent_and_children,
    chunks,
    doubling_steps,
    gather_steps,
    largest_power_of_two,
    pieces,
    ring_steps,
    scatter_steps,
    split_aligned,
    split_evenly,
    within,
)

SIZES = [1, 2, 3, 4, 5, 7, 8, 16, 33]


@pytest.mark.parametrize("size", SIZES)
def test_ring_brings_every_contribution_to_every_rank_once(size: int) -> None:
    # held[rank][chunk] lists whose values it contains; a list would show one that was added twice.
    held = [[[rank] for _ in range(size)] for rank in range(size)]
    for steps in zip(*(ring_steps(rank, size) for rank in range(size)), strict=True):
        sent = [list(held[rank][step.send]) for rank, step in enumerate(steps)]
        for rank, step in enumerate(steps):
            left = (rank - 1) % size
            assert step.receive == steps[left].send
            held[rank][step.receive] = sent[left] + (held[rank][step.receive] if step.reduce else [])
    assert all(sorted(chunk) == list(range(size)) for rank in held for chunk in rank)


@pytest.mark.parametrize("size", SIZES)
def test_ring_has_two_steps_for_each_other_rank(size: int) -> None:
    assert len(list(ring_steps(0, size))) == 2 * (size - 1)
    assert sum(step.reduce for step in ring_steps(0, size)) == size - 1


@pytest.mark.parametrize("size", SIZES)
def test_ring_chunk_is_complete_one_place_after_the_scatter(size: int) -> None:
    for rank in range(size):
        last = [*scatter_steps(rank, size)][-1:]
        assert all(step.receive == (rank + 1) % size for step in last)
        assert [step.send for step in gather_steps(rank, size, rank)][:1] == [rank][: size - 1]


@pytest.mark.parametrize("size", SIZES)
def test_doubling_combines_every_rank_once_on_every_rank(size: int) -> None:
    todo = [list(doubling_steps(rank, size)) for rank in range(size)]
    held = [[rank] for rank in range(size)]
    while any(todo):
        # A step runs when both sides have reached it; no progress would be a deadlock.
        ready = [
            (rank, steps[0]) for rank, steps in enumerate(todo)
            if steps and todo[steps[0].partner] and todo[steps[0].partner][0].partner == rank
        ]  # fmt: skip
        assert ready
        sent = {rank: list(held[rank]) for rank, _ in ready}
        for rank, step in ready:
            partner = todo[step.partner][0]
            assert (step.sends, step.receives) == (partner.receives, partner.sends)
            if step.receives:
                held[rank] = sent[step.partner] + (sent[rank] if step.reduces else [])
        for rank, _ in ready:
            del todo[rank][0]
    assert all(sorted(contributions) == list(range(size)) for contributions in held)


@pytest.mark.parametrize(("size", "steps"), [(1, 0), (2, 1), (3, 3), (4, 2), (7, 4), (8, 3), (33, 7)])
def test_doubling_takes_as_few_steps_as_documented(size: int, steps: int) -> None:
    assert max(len(list(doubling_steps(rank, size))) for rank in range(size)) == steps


@pytest.mark.parametrize("size", SIZES)
def test_binomial_tree_reaches_everyone_from_every_root_in_log_steps(size: int) -> None:
    for root in range(size):
        family = [binomial_parent_and_children(rank, size, root) for rank in range(size)]
        reached, generation, depth = {root}, [root], 0
        while generation:
            following = [child for rank in generation for child in family[rank][1]]
            assert all(family[child][0] == rank for rank in generation for child in family[rank][1])
            assert not reached & set(following)
            reached |= set(following)
            depth += bool(following)
            generation = following
        assert reached == set(range(size))
        assert family[root][0] is None
        assert depth <= (size - 1).bit_length()


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (9, 8)])
def test_largest_power_of_two(size: int, power: int) -> None:
    assert largest_power_of_two(size) == power


@pytest.mark.parametrize("length", [0, 1, 5, 7, 100])
@pytest.mark.parametrize("n_parts", [1, 2, 3, 7])
def test_even_split_differs_by_one_at_most(length: int, n_parts: int) -> None:
    bounds = split_evenly(length, n_parts)
    lengths = [high - low for low, high in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, length, n_parts)
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 100, 1000])
@pytest.mark.parametrize("n_parts", [1, 2, 3, 7])
def test_aligned_split_cuts_at_multiples_only(length: int, n_parts: int) -> None:
    bounds = split_aligned(length, n_parts, 16)
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, length, n_parts + 1)
    assert all(bound % 16 == 0 or bound == length for bound in bounds)


def test_chunks_cover_a_run_without_empty_ones() -> None:
    assert list(chunks(0, 4)) == []
    assert list(chunks(9, 4)) == [(0, 4), (4, 8), (8, 9)]


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 5, 0, 0, 1], [3, 8, 2, 0, 11]])
def test_pieces_cut_every_element_once_and_fill_up(lengths: list[int], capacity: int) -> None:
    cut = list(pieces(lengths, capacity))
    elements = [(part.tensor, at) for piece in cut for part in piece for at in range(part.start, part.stop)]
    assert elements == [(tensor, at) for tensor, length in enumerate(lengths) for at in range(length)]
    filled = [sum(part.stop - part.start for part in piece) for piece in cut]
    assert all(n == capacity for n in filled[:-1])
    assert all(0 < n <= capacity for n in filled)
    assert all(part.start < part.stop for piece in cut for part in piece)


@pytest.mark.parametrize("low", range(11))
@pytest.mark.parametrize("high", range(11))
def test_within_finds_what_lies_in_a_slice_of_a_piece(low: int, high: int) -> None:
    piece = [Part(0, 5, 8), Part(1, 0, 1), Part(3, 2, 8)]
    flat = [(part.tensor, at) for part in piece for at in range(part.start, part.stop)]
    found = []
    for part, offset in within(piece, low, high):
        assert low <= offset < high
        assert flat[offset] == (part.tensor, part.start)
        found += [(part.tensor, at) for at in range(part.start, part.stop)]
    assert found == flat[low:high]
