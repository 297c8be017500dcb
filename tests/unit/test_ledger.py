"""The coordinator's book: any order of submission, early second submissions, groups, joins."""

from __future__ import annotations

import itertools

import pytest

from hvdlite.messages import JOIN_NAME, Kind, Request
from hvdlite.negotiation.ledger import Ledger


def allreduce(name, **more):
    return Request(Kind.ALLREDUCE, name, "float32", (2,), **more)


JOIN = Request(Kind.JOIN, JOIN_NAME)


def complete(ledger):
    return [next(iter(entry.requests.values())).name for entry in ledger.take_complete()]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_name_is_complete_when_the_last_rank_came_whatever_the_order(size):
    for order in itertools.permutations(range(size)):
        ledger = Ledger(size)
        for rank in order[:-1]:
            ledger.add(rank, allreduce("w"), now=0)
            assert ledger.take_complete() == []
        ledger.add(order[-1], allreduce("w"), now=0)
        (entry,) = ledger.take_complete()
        assert set(entry.requests) == set(range(size))
        assert not ledger.waiting


def test_names_are_handed_out_in_the_order_of_completion():
    ledger = Ledger(2)
    for rank, name in [(0, "a"), (0, "b"), (1, "b"), (1, "a")]:
        ledger.add(rank, allreduce(name), now=0)
    assert complete(ledger) == ["b", "a"]
    assert complete(ledger) == []


def test_missing_ranks_and_the_first_submission_are_known():
    ledger = Ledger(4)
    ledger.add(2, allreduce("w"), now=7)
    ledger.add(0, allreduce("w"), now=9)
    assert ledger.missing("w") == [1, 3]
    assert ledger.waiting["w"].since == 7


def test_an_early_second_submission_waits_its_turn():
    ledger = Ledger(2)
    ledger.add(0, allreduce("w", problem="first try"), now=1)
    ledger.add(0, allreduce("w"), now=2)
    ledger.add(1, allreduce("w"), now=3)
    (entry,) = ledger.take_complete()
    assert entry.requests[0].problem == "first try"
    assert ledger.missing("w") == [1]
    ledger.add(1, allreduce("w"), now=4)
    (entry,) = ledger.take_complete()
    assert entry.requests[0].problem == ""


def test_several_early_submissions_keep_their_order():
    ledger = Ledger(2)
    for shape in (1, 2, 3):
        ledger.add(0, allreduce("w")._replace(shape=(shape,)), now=0)
    for _ in range(3):
        ledger.add(1, allreduce("w"), now=0)
    assert [entry.requests[0].shape for entry in ledger.take_complete()] == [(1,), (2,), (3,)]


def test_ids_and_full_requests_are_told_apart():
    ledger = Ledger(2)
    ledger.add(0, allreduce("w"), 0, cache_id=5)
    ledger.add(1, allreduce("w"), 0)
    assert ledger.take_complete()[0].ids == {5, None}


def group(name, of="g", size=2):
    return allreduce(name, group=of, group_size=size)


def test_a_group_is_handed_out_as_one():
    ledger = Ledger(2)
    for rank, name in [(0, "a"), (0, "b"), (1, "a")]:
        ledger.add(rank, group(name), now=0)
    ledger.add(0, allreduce("single"), now=0)
    ledger.add(1, allreduce("single"), now=0)
    assert complete(ledger) == ["single"]
    ledger.add(1, group("b"), now=0)
    assert complete(ledger) == ["a", "b"]


def test_a_group_on_which_the_ranks_differ_is_complete_at_once():
    ledger = Ledger(2)
    ledger.add(0, group("a"), now=0)
    ledger.add(1, allreduce("a"), now=0)
    assert complete(ledger) == ["a"]


def test_members_of_a_group_that_wait_for_the_others_still_count_as_waiting():
    # Else the coordinator would evict their cache ids, and the stall watch would overlook them.
    ledger = Ledger(2)
    for rank in (0, 1):
        ledger.add(rank, group("a"), now=0, cache_id=1)
    assert ledger.is_pending("a")
    assert not ledger.is_pending("b")


def test_a_joined_rank_completes_what_the_others_wait_for():
    ledger = Ledger(3)
    ledger.add(0, allreduce("w"), now=0)
    ledger.add(2, JOIN, now=0)
    assert complete(ledger) == []
    ledger.add(1, allreduce("w"), now=0)
    assert complete(ledger) == ["w"]
    ledger.add(0, allreduce("v"), now=0)
    assert ledger.missing("v") == [1]
    ledger.add(1, JOIN, now=0)
    assert complete(ledger) == ["v"]
    assert ledger.joined == [2, 1]
    assert ledger.take_joined() is None


def test_what_a_rank_submitted_before_it_joined_still_counts_as_its_own():
    ledger = Ledger(2)
    ledger.add(0, allreduce("w"), now=0)
    ledger.add(0, JOIN, now=0)
    assert complete(ledger) == []
    assert ledger.missing("w") == [1]
    ledger.add(1, allreduce("w"), now=0)
    (entry,) = ledger.take_complete()
    assert set(entry.requests) == {0, 1}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_last_rank_to_join_is_returned_once_and_forgotten(size):
    ledger = Ledger(size)
    for round_ in range(2):
        order = [(rank + round_) % size for rank in range(size)]
        for rank in order:
            assert ledger.take_joined() is None
            ledger.add(rank, JOIN, now=0)
        assert ledger.take_joined() == order[-1]
    assert ledger.joined == []


def test_a_dropped_name_is_forgotten_and_tells_who_wanted_it():
    ledger = Ledger(3)
    ledger.add(2, allreduce("w"), now=0)
    assert set(ledger.drop("w")) == {2}
    assert not ledger.waiting
    for rank in range(3):
        ledger.add(rank, allreduce("w"), now=0)
    assert complete(ledger) == ["w"]


def test_an_early_second_submission_outlives_a_dropped_first():
    ledger = Ledger(3)
    ledger.add(2, allreduce("w", problem="first try"), now=1)
    ledger.add(2, allreduce("w"), now=2)
    assert ledger.drop("w")[2].problem == "first try"
    assert ledger.missing("w") == [0, 1]
    ledger.add(0, allreduce("w"), now=3)
    ledger.add(1, allreduce("w"), now=3)
    (entry,) = ledger.take_complete()
    assert entry.requests[2].problem == ""


def long_group(name):
    return group(name, of="g#3#x", size=3)


def short_group(name):
    return group(name, of="g#2#x", size=2)


def test_groups_of_one_name_that_differ_are_split():
    ledger = Ledger(2)
    ledger.add(0, short_group("a"), now=0)
    assert ledger.take_split_groups() == []
    ledger.add(1, long_group("c"), now=0)
    assert ledger.take_split_groups() == [{"g#2#x": [0], "g#3#x": [1]}]
    assert ledger.take_split_groups() == []


def test_a_refused_group_may_be_tried_again_with_other_members():
    # Rank 2 fails locally and comes back at once with more tensors: it means the next group of that name.
    ledger = Ledger(3)
    for name in "ab":
        ledger.add(2, allreduce(name, problem="no"), now=0)
    for name in "cde":
        ledger.add(2, long_group(name), now=0)
    for rank in (0, 1):
        for name in "ab":
            ledger.add(rank, short_group(name), now=0)
    assert ledger.take_split_groups() == []
    assert complete(ledger) == ["a", "b"]
    for rank in (0, 1):
        for name in "cde":
            ledger.add(rank, long_group(name), now=0)
    assert ledger.take_split_groups() == []
    assert complete(ledger) == ["c", "d", "e"]


def test_two_groups_of_one_name_may_be_in_flight():
    ledger = Ledger(2)
    for rank in (0, 1):
        for name in "ab":
            ledger.add(rank, short_group(name), now=0)
        for name in "cde":
            ledger.add(rank, long_group(name), now=0)
        assert ledger.take_split_groups() == []
    assert complete(ledger) == list("abcde")


def test_a_dropped_group_leaves_no_opinion_of_its_ranks():
    ledger = Ledger(2)
    ledger.add(0, short_group("a"), now=0)
    ledger.drop("a")
    ledger.add(1, long_group("c"), now=0)
    assert ledger.take_split_groups() == []


def test_names_in_groups_finds_incomplete_members():
    ledger = Ledger(2)
    ledger.add(0, group("a", of="g"), now=0)
    ledger.add(0, group("b", of="h"), now=0)
    ledger.add(0, allreduce("c"), now=0)
    assert ledger.names_in_groups({"g"}) == ["a"]
    assert sorted(ledger.names_in_groups({"g", "h"})) == ["a", "b"]
