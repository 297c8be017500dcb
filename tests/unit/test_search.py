"""The search for sizes, on made-up machines: what it finds, what it costs, and that noise fools it not."""

from __future__ import annotations

import random

import pytest

from hvdlite.messages import Knobs
from hvdlite.topology import Topology
from hvdlite.tuning.search import Search, grid_for

MIB = 2**20
DEFAULT = Knobs(64 * MIB, MIB, MIB // 2, 16 * 1024)
GRID = {
    "fusion_threshold": [MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB],
    "shared_memory_piece": [MIB // 2, MIB, 2 * MIB],
}
ONE_HOST, TWO_HOSTS = Topology(0, ("a", "a")), Topology(0, ("a", "a", "b", "b"))


def run(speed, grid=GRID, budget=40):
    """Search on a machine whose speed is `speed(knobs)`, and return the search and what it tried."""
    search, tried = Search(DEFAULT, grid, budget), []
    while not search.done:
        tried.append(search.current)
        search.tell(speed(search.current))
    return search, tried


def test_the_fastest_point_of_the_grid_is_found():
    def speed(knobs):
        return 100 + 30 * (knobs.fusion_threshold == 4 * MIB) + 20 * (knobs.shared_memory_piece == 2 * MIB)

    search, _ = run(speed)
    assert search.best == DEFAULT._replace(fusion_threshold=4 * MIB, shared_memory_piece=2 * MIB)
    assert search.gain == pytest.approx(0.5)
    assert search.current == search.best


def test_a_knob_that_only_helps_with_another_one_is_tried_with_the_best_so_far():
    def speed(knobs):
        small = knobs.fusion_threshold == MIB
        return 150 if small and knobs.shared_memory_piece == MIB // 2 else 120 if small else 100

    assert run(speed)[0].best == DEFAULT._replace(fusion_threshold=MIB, shared_memory_piece=MIB // 2)


@pytest.mark.parametrize("gain", [0.0, 0.01])
def test_what_is_not_clearly_better_than_the_default_is_left(gain):
    search, tried = run(lambda knobs: 100 * (1 + gain * (knobs != DEFAULT)))
    assert search.best == DEFAULT
    assert search.gain == 0
    assert tried[0] == DEFAULT


@pytest.mark.parametrize("budget", [1, 2, 5, 6, 7, 12, 20, 40, 100])
def test_there_are_never_more_samples_than_allowed(budget):
    search, tried = run(lambda knobs: 200.0 - knobs.fusion_threshold / MIB, budget=budget)
    assert len(tried) <= budget
    assert search.done
    assert search.best == DEFAULT if budget < 12 else search.best.fusion_threshold == MIB // 4


def test_a_grid_without_choices_is_done_at_once():
    assert Search(DEFAULT, {}, 40).done
    assert Search(DEFAULT, {"fusion_threshold": [DEFAULT.fusion_threshold]}, 40).done


def test_a_machine_that_speeds_up_all_the_time_favours_none():
    now = iter(range(1000))
    search, _ = run(lambda knobs: 100 + 3 * next(now))
    assert search.best == DEFAULT


def test_noise_never_makes_it_clearly_worse_and_mostly_finds_the_gain():
    """Samples spread by 5 %; the best point is 15 % faster than the default, the worst half as fast."""
    speeds = {MIB // 4: 50, MIB: 90, 4 * MIB: 115, 16 * MIB: 108, 64 * MIB: 100}
    results = []
    for seed in range(200):
        noise = random.Random(seed)
        search, _ = run(lambda knobs, noise=noise: speeds[knobs.fusion_threshold] * noise.gauss(1, 0.05))
        results.append(speeds[search.best.fusion_threshold])
    assert min(results) >= 100
    assert sum(result > 100 for result in results) > 180


def test_a_slow_machine_with_zero_speed_does_not_divide_by_it():
    assert run(lambda knobs: 0.0 if knobs == DEFAULT else 1.0)[0].best == DEFAULT


def grid(topology=ONE_HOST, step_bytes=100 * MIB, backend="auto", shared_memory=True, pinned=()):
    return grid_for(DEFAULT, topology, backend=backend, shared_memory=shared_memory,
                    pinned=frozenset(pinned), step_bytes=step_bytes)  # fmt: skip


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (grid(), ["fusion_threshold", "shared_memory_piece"]),
        (grid(TWO_HOSTS), ["fusion_threshold", "hierarchical", "ring_chunk", "small_message"]),
        (grid(Topology(0, ("a", "b"))), ["fusion_threshold", "ring_chunk", "small_message"]),
        (grid(Topology(0, ("a", "a", "b"))), ["fusion_threshold", "ring_chunk", "small_message"]),
        (grid(shared_memory=False), ["fusion_threshold", "ring_chunk"]),
        (grid(backend="ring"), ["fusion_threshold", "ring_chunk"]),
        (grid(backend="mpi_native"), ["fusion_threshold"]),
        (grid(TWO_HOSTS, backend="tree"), ["fusion_threshold"]),
        (grid(pinned=["fusion_threshold"]), ["shared_memory_piece"]),
        (grid(step_bytes=1000), []),
    ],
)
def test_only_knobs_that_matter_here_are_tried(found, names):
    assert list(found) == names


def test_sizes_beyond_a_step_are_not_tried():
    assert grid(step_bytes=5 * MIB)["fusion_threshold"] == [MIB // 4, MIB, 4 * MIB]
