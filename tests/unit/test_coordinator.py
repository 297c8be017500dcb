"""What runs next: hits, replacement, eviction, groups, joins, leaving. One coordinator, no communicator."""

from __future__ import annotations

import itertools

import pytest

from hvdlite.errors import HorovodInternalError, MismatchError, RemoteError, StallError
from hvdlite.messages import JOIN_NAME, Announcement, Kind, Knobs, Refusal, Request, Response
from hvdlite.negotiation.coordinator import Coordinator

JOIN = Request(Kind.JOIN, JOIN_NAME)


def allreduce(name, **more):
    return Request(Kind.ALLREDUCE, name, "float32", (2,))._replace(**more)


def coordinator(size=2, capacity=100, threshold=77):
    return Coordinator([10 + rank for rank in range(size)], capacity, threshold, clock=lambda: 0.0)


def say(to, rank, *wishes):
    """Let set rank `rank` announce ids and Requests."""
    to.hear(
        rank, Announcement([w for w in wishes if isinstance(w, int)], [w for w in wishes if not isinstance(w, int)])
    )


def agree(to, *wishes):
    """Let all ranks announce `wishes`, and return the Verdict."""
    for rank in range(len(to.members)):
        say(to, rank, *wishes)
    return to.decide()


def names(verdict):
    return [entry if isinstance(entry, int) else entry.name for entry in verdict.entries]


def test_nothing_is_decided_until_all_ranks_have_asked():
    one = coordinator(3)
    assert one.decide() is None
    say(one, 2, allreduce("w"))
    say(one, 0, allreduce("w"))
    assert one.decide() is None
    say(one, 1, allreduce("w"))
    verdict = one.decide()
    assert [(r.kind, r.name) for r in verdict.entries] == [(Kind.ALLREDUCE, "w")]
    assert verdict.fusion_threshold == 77
    assert verdict.shutdown == ""
    assert one.decide() is None


def test_a_single_rank_needs_nobody():
    assert names(agree(coordinator(1), allreduce("w"))) == ["w"]


def test_an_answer_gets_an_id_and_the_id_is_the_answer_from_then_on():
    one = coordinator()
    verdict = agree(one, allreduce("a"), allreduce("b"))
    assert verdict.new_ids == {"a": 0, "b": 1}
    again = agree(one, 1, 0)
    assert again.entries == [1, 0]
    assert again.new_ids == {}


@pytest.mark.parametrize("kind", [Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER])
def test_every_kind_that_moves_data_is_remembered(kind):
    assert agree(coordinator(), allreduce("w", kind=kind, root=0)).new_ids == {"w": 0}


@pytest.mark.parametrize("kind", [Kind.BARRIER, Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET])
def test_what_carries_nothing_is_not_remembered(kind):
    assert agree(coordinator(), Request(kind, "x")).new_ids == {}


def test_a_changed_request_replaces_the_id_of_its_name():
    one = coordinator()
    agree(one, allreduce("w"))
    verdict = agree(one, allreduce("w", shape=(3,)))
    assert verdict.entries[0].shape == (3,)
    assert verdict.new_ids == {"w": 1}
    assert verdict.evicted == []  # every rank forgets an older id of the name by itself
    assert agree(one, 1).entries == [1]


def test_a_known_and_a_changed_request_are_a_mismatch_and_the_id_survives():
    one = coordinator()
    agree(one, allreduce("w"))
    say(one, 0, 0)
    say(one, 1, allreduce("w", shape=(3,)))
    error = one.decide().entries[0].refusal.exception()
    assert isinstance(error, MismatchError)
    assert error.by_value == {"[2]": [10], "[3]": [11]}
    assert agree(one, 0).entries == [0]


def test_an_allgather_that_grew_on_one_rank_is_answered_anew():
    one = coordinator()
    agree(one, allreduce("w", kind=Kind.ALLGATHER))
    say(one, 0, 0)
    say(one, 1, allreduce("w", kind=Kind.ALLGATHER, shape=(5,)))
    verdict = one.decide()
    assert verdict.entries[0].sizes == (2, 5)
    assert verdict.new_ids == {"w": 1}


def test_a_refused_answer_is_not_remembered():
    one = coordinator()
    say(one, 0, allreduce("w"))
    say(one, 1, allreduce("w", dtype="int8"))
    assert one.decide().new_ids == {}
    assert agree(one, allreduce("w")).new_ids == {"w": 0}


def test_capacity_zero_remembers_nothing():
    one = coordinator(capacity=0)
    for _ in range(3):
        verdict = agree(one, allreduce("a"), allreduce("b"))
        assert names(verdict) == ["a", "b"]
        assert verdict.new_ids == {}
        assert verdict.evicted == []


def test_capacity_one_remembers_the_latest():
    one = coordinator(capacity=1)
    assert agree(one, allreduce("a")).new_ids == {"a": 0}
    verdict = agree(one, allreduce("b"))
    assert verdict.new_ids == {"b": 1}
    assert verdict.evicted == [0]
    assert agree(one, 1).entries == [1]


def test_the_least_recently_used_is_evicted_first():
    one = coordinator(capacity=3)
    agree(one, allreduce("a"), allreduce("b"), allreduce("c"))
    agree(one, 0)  # now b is the oldest
    assert agree(one, allreduce("d")).evicted == [1]
    assert agree(one, 2).entries == [2]
    assert agree(one, allreduce("e"), allreduce("f")).evicted == [0, 3]


def test_an_id_is_never_given_twice():
    one = coordinator(capacity=1)
    seen = [agree(one, allreduce(name)).new_ids[name] for name in "abcabc"]
    assert len(set(seen)) == 6


def test_an_id_that_some_rank_has_announced_is_not_evicted():
    one = coordinator(capacity=1)
    agree(one, allreduce("a"))
    say(one, 0, 0)
    verdict = agree(one, allreduce("b"))
    assert verdict.evicted == [verdict.new_ids["b"]]
    say(one, 1, 0)
    assert one.decide().entries == [0]


def test_an_evicted_id_that_is_announced_late_is_ignored():
    # Its rank sees the eviction, and announces the request in full.
    one = coordinator(capacity=1)
    agree(one, allreduce("a"))
    agree(one, allreduce("b"))
    say(one, 0, 0)
    assert one.decide() is None
    assert not one.ledger.waiting
    assert names(agree(one, allreduce("a"))) == ["a"]


def group(name, **more):
    return allreduce(name, group="g", group_size=2, **more)


def test_a_group_comes_out_as_one_and_in_order():
    one = coordinator()
    say(one, 0, group("a"), group("b"))
    say(one, 1, group("b"))
    assert one.decide() is None
    say(one, 1, group("a"))
    assert names(one.decide()) == ["b", "a"]


def test_a_mismatch_in_one_member_refuses_the_whole_group():
    one = coordinator()
    say(one, 0, group("a"), group("b"))
    say(one, 1, group("a"), group("b", dtype="int8"))
    a, b = one.decide().entries
    assert isinstance(b.refusal.exception(), MismatchError)
    error = a.refusal.exception()
    assert isinstance(error, HorovodInternalError)
    for word in ("'a'", "'b'", "float32", "int8", "rank 10", "rank 11"):
        assert word in str(error)
    assert not one.ledger.waiting


def test_a_cached_member_is_refused_with_its_group():
    one = coordinator()
    assert agree(one, group("a"), group("b")).new_ids == {"a": 0, "b": 1}
    say(one, 0, 0, 1)
    say(one, 1, 0, group("b", shape=(9,)))
    entries = one.decide().entries
    assert [(entry.name, entry.refusal is not None) for entry in entries] == [("a", True), ("b", True)]
    assert agree(one, 0, 1).entries == [0, 1]


def test_ranks_that_disagree_about_a_group_leave_nothing_behind():
    one = coordinator()
    say(one, 0, allreduce("a", group="ab", group_size=2), allreduce("b", group="ab", group_size=2))
    say(one, 1, allreduce("a", group="ac", group_size=2), allreduce("c", group="ac", group_size=2))
    entries = one.decide().entries
    assert sorted(entry.name for entry in entries) == ["a", "b", "c"]
    assert all(entry.refusal for entry in entries)
    assert not one.ledger.waiting


def test_a_member_refused_early_is_refused_only_on_the_ranks_that_asked():
    # Rank 1 has not asked for b yet; when it does, its request must not be taken for answered.
    one = coordinator()
    say(one, 0, group("a"), group("b"))
    say(one, 1, allreduce("a"))
    refused = {entry.name: entry for entry in one.decide().entries}
    assert refused["b"].joined == (1,)
    assert refused["a"].joined == ()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_next_try_of_a_rank_that_failed_is_not_refused_with_the_group(order):
    one = coordinator(3)
    for rank in order:
        if rank == 2:
            say(one, 2, *[Request(Kind.ALLREDUCE, name, problem="no") for name in "ab"])
            say(one, 2, group("a"), group("b"))
        else:
            say(one, rank, group("a"), group("b"))
    entries = one.decide().entries
    assert [(entry.name, entry.joined) for entry in entries] == [("a", ()), ("b", ())]
    assert all(isinstance(entry.refusal.exception(), RemoteError) for entry in entries)
    say(one, 0, group("a"), group("b"))
    assert one.decide() is None
    say(one, 1, group("a"), group("b"))
    assert [(entry.name, entry.refusal) for entry in one.decide().entries] == [("a", None), ("b", None)]


def test_the_next_try_outlives_a_group_on_which_the_others_disagree():
    one = coordinator(3)
    say(one, 2, *[Request(Kind.ALLREDUCE, name, problem="no") for name in "ab"])
    say(one, 2, group("a"), group("b"))
    say(one, 0, group("a"), group("b"))
    say(one, 1, allreduce("a", group="ac", group_size=2), allreduce("c", group="ac", group_size=2))
    assert [(entry.name, entry.joined) for entry in one.decide().entries] == [("a", ()), ("b", (1,)), ("c", (0, 2))]
    say(one, 0, group("a"), group("b"))
    say(one, 1, group("a"), group("b"))
    assert [(entry.name, entry.refusal) for entry in one.decide().entries] == [("a", None), ("b", None)]
    assert not one.ledger.waiting


def test_an_announced_member_of_an_incomplete_group_is_not_evicted():
    one = coordinator(capacity=2)
    agree(one, group("a"), group("b"))
    agree(one, allreduce("c"))  # evicts a
    for rank in (0, 1):
        say(one, rank, 0, 1)  # a, not known any more, and b
    assert one.decide() is None
    verdict = agree(one, allreduce("d"), allreduce("e"))
    assert 1 not in verdict.evicted
    assert names(agree(one, group("a"))) == [1, "a"]


def test_a_problem_of_one_rank_reaches_all():
    one = coordinator()
    say(one, 0, allreduce("w"))
    say(one, 1, Request(Kind.ALLREDUCE, "w", problem="no such op"))
    error = one.decide().entries[0].refusal.exception()
    assert isinstance(error, RemoteError)
    assert error.problems == {11: "no such op"}


def test_while_a_rank_has_joined_nothing_is_cached():
    one = coordinator()
    agree(one, allreduce("w"))
    say(one, 1, JOIN)
    say(one, 0, 0)
    verdict = one.decide()
    assert verdict.entries[0].joined == (1,)
    assert verdict.entries[0].refusal is None
    assert verdict.new_ids == {}
    say(one, 0, JOIN)
    assert one.decide().entries == [Response(Kind.JOIN, JOIN_NAME, last_joined=0)]
    assert agree(one, 0).entries == [0]


def test_the_join_is_answered_after_what_it_completes():
    one = coordinator()
    say(one, 0, allreduce("w"), JOIN)
    say(one, 1, JOIN)
    assert names(one.decide()) == ["w", JOIN_NAME]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_stops_the_set_after_what_is_ready(rank):
    one = coordinator()
    one.leave(rank, "has ended its program")
    one.leave(1 - rank, "came later")
    verdict = agree(one, allreduce("w"))
    assert names(verdict) == ["w"]
    assert verdict.shutdown == f"rank {10 + rank} has ended its program"


def test_a_set_that_stops_says_first_what_was_wrong_somewhere():
    one = coordinator(3)
    say(one, 1, Request(Kind.ALLREDUCE, "w", problem="no such op"))
    say(one, 2, allreduce("v"))
    one.leave(1, "has ended its program")
    verdict = one.decide()
    (entry,) = verdict.entries
    assert entry.refusal.exception().problems == {11: "no such op"}
    assert entry.joined == (0, 2)
    assert verdict.shutdown == "rank 11 has ended its program"


def test_a_name_that_is_given_up_fails_where_it_was_asked_for():
    one = coordinator(3)
    say(one, 1, allreduce("w"))
    one.refuse("w", Refusal("stall", "w", "waited too long"))
    (entry,) = one.decide().entries
    assert isinstance(entry.refusal.exception(), StallError)
    assert entry.joined == (0, 2)
    assert not one.ledger.waiting


def test_other_knobs_travel_once_with_the_next_verdict_and_cause_none():
    one, knobs = coordinator(), Knobs(5, 4, 3, 2)
    one.retune(Knobs(1, 1, 1, 1))
    one.retune(knobs)
    assert one.has_news
    assert one.decide() is None
    verdict = agree(one, allreduce("w"))
    assert (verdict.knobs, verdict.fusion_threshold) == (knobs, 5)
    assert not one.has_news
    verdict = agree(one, allreduce("v"))
    assert (verdict.knobs, verdict.fusion_threshold) == (None, 5)
