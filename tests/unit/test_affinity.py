"""What is said of the cores that the ranks of a host may use."""

from __future__ import annotations

import pytest

from hvdlite.affinity import complaint, cores_of_this_thread, describe_cores


@pytest.mark.parametrize(
    ("cores", "text"), [([], ""), ([4], "4"), ([0, 1], "0-1"), ([0, 2], "0,2"), ([0, 1, 2, 5, 8, 9], "0-2,5,8-9")]
)
def test_cores_are_written_as_ranges(cores, text):
    assert describe_cores(cores) == text


def test_a_thread_may_use_some_core():
    assert cores_of_this_thread() == sorted(set(cores_of_this_thread())) != []


@pytest.mark.parametrize(
    ("cores", "n_cores", "engines", "text"),
    [
        ([[0, 1], [0, 1]], 2, (), ""),
        ([[0, 1, 2, 3]] * 4, 4, (0, 1, 2, 3), ""),
        ([[0, 1]] * 3, 2, (), ""),  # more ranks than cores, and no binding that would help
        ([[0]] * 3, 1, (), ""),
        ([[0, 1]] * 3, 8, (), "ranks 4, 5, 6 are bound to the same cores 0-1 of 8 and take turns"),
        ([[3], [3]], 8, (), "ranks 4, 5 are bound to the same core 3 of 8 and take turns"),
        ([[0], [1]], 2, (), "ranks 4, 5 may use 1 of 2 cores each"),
        ([[0, 1], [2]], 4, (), "rank 5 may use 1 of 4 cores each"),
        ([[0, 1], [0, 1]], 2, (1, 1), "HVDLITE_THREAD_AFFINITY puts the engines of ranks 4, 5 on core 1."),
        ([[0, 1], [0, 1]], 2, (1, 0, 0), ""),  # the third entry is for a rank that there is not
    ],
)
def test_ranks_that_take_turns_on_a_core_are_named(cores, n_cores, engines, text):
    found = complaint(cores, [4, 5, 6, 7][: len(cores)], n_cores, engines)
    assert found.startswith(text) if text else found == ""
    if "core" in text and "THREAD_AFFINITY" not in text:
        assert "--bind-to none" in found


def test_a_rank_alone_on_its_host_may_do_with_one_core():
    assert complaint([[0]], [0], 8, ()) == ""
