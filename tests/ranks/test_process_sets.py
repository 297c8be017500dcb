"""Process sets: static and dynamic, their ids, members and outsiders, and several at once."""

from __future__ import annotations

import random

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.testing.ranks import run_ranks


def total(value, process_set, name=None):
    return float(hvd.allreduce(float(value), op=hvd.Sum, name=name, process_set=process_set))


# The object


def test_ranks_are_sorted_whatever_order_is_given():
    assert hvd.ProcessSet([2, 0, 1]).ranks == [0, 1, 2]
    assert hvd.ProcessSet(reversed(range(3))).ranks == [0, 1, 2]
    assert hvd.ProcessSet({5, 3}).ranks == [3, 5]


@pytest.mark.parametrize("wrong", [[0, "1"], [0.0], [True], 3, None])
def test_ranks_must_be_integers(wrong):
    with pytest.raises(ValueError, match="ProcessSet"):
        hvd.ProcessSet(wrong)


def test_a_set_that_is_not_registered_has_no_id_size_or_rank(on_ranks):
    def body(rank):
        one = hvd.ProcessSet([0, 1])
        assert (one.process_set_id, one.size(), one.rank()) == (None, None, None)
        assert one.included() == (rank < 2)
        with pytest.raises(hvd.InvalidRequestError, match="not registered"):
            hvd.allreduce(1.0, process_set=one)

    on_ranks(3, body)


def test_before_init_a_set_can_say_only_its_ranks():
    one = hvd.ProcessSet([0, 1])
    assert one.size() is None
    with pytest.raises(ValueError, match="init"):
        one.included()


def test_a_set_shows_its_attributes(on_ranks):
    def body(rank):
        one = hvd.add_process_set([2, 1])
        assert str(one) == "ProcessSet(process_set_id=1, ranks=[1, 2], mpi_comm=None)"
        assert one != hvd.ProcessSet([1, 2])
        assert one.size() == 2
        if rank:
            assert one.rank() == rank - 1
            assert one.included() is True
        else:
            assert one.included() is False
            with pytest.raises(hvd.NotMemberError, match="rank 0"):
                one.rank()
        assert hvd.global_process_set.process_set_id == 0
        assert hvd.global_process_set.ranks == [0, 1, 2]
        assert hvd.global_process_set.size() == 3
        assert hvd.global_process_set.rank() == rank

    on_ranks(3, body)


# Static


def init_with(size, make_sets, body):
    def play(comm):
        sets = make_sets()
        hvd.init(process_sets=sets)
        return body(comm.rank, *sets)

    return run_ranks(size, play, setup=runtime.as_rank)


def test_sets_given_to_init_get_ids_in_order():
    def body(rank, even, odd):
        assert (even.process_set_id, odd.process_set_id) == (1, 2)
        return total(rank, even if rank % 2 == 0 else odd)

    make = lambda: [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]  # noqa: E731
    assert init_with(4, make, body) == [2.0, 4.0, 2.0, 4.0]


def test_a_second_init_binds_sets_to_what_is_registered():
    def body(rank, first):
        again, more = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
        hvd.init(process_sets=[again, more])
        return first.process_set_id, again.process_set_id, more.process_set_id

    assert init_with(3, lambda: [hvd.ProcessSet([1, 0])], body) == [(1, 1, 2)] * 3


@pytest.mark.parametrize("ranks", [[[0, 1], [1, 0]], [[0, 1, 2]]])
def test_duplicates_given_to_init_raise_and_hvdlite_runs(ranks):
    def play(comm):
        sets = [hvd.ProcessSet(one) for one in ranks]
        with pytest.raises(ValueError, match="twice"):
            hvd.init(process_sets=sets)
        assert sets[-1].process_set_id is None
        return float(hvd.allreduce(1.0, op=hvd.Sum))

    assert run_ranks(3, play, setup=runtime.as_rank) == [3.0] * 3


def test_dynamic_is_accepted_as_a_word():
    def play(comm):
        hvd.init(process_sets="Dynamic")
        with pytest.raises(ValueError, match="'static'"):
            hvd.init(process_sets="static")
        return hvd.add_process_set([0]).process_set_id

    assert run_ranks(2, play, setup=runtime.as_rank) == [1, 1]


# Dynamic


def test_ids_of_removed_sets_are_used_again_the_first_freed_first(on_ranks):
    def body(rank):
        sets = [hvd.add_process_set(ranks) for ranks in ([0], [1], [0, 1], [1, 2])]
        assert [one.process_set_id for one in sets] == [1, 2, 3, 4]
        for i in (2, 0):
            assert hvd.remove_process_set(sets[i]) is True
            assert sets[i].process_set_id is None
            assert hvd.remove_process_set(sets[i]) is False
        ids = [hvd.add_process_set(ranks).process_set_id for ranks in ([2], [0, 2], [0])]
        back = hvd.add_process_set(sets[2])
        assert back is sets[2]
        return ids, back.process_set_id, total(rank, back) if back.included() else None

    results = on_ranks(3, body)
    assert [ids for ids, _, _ in results] == [[3, 1, 5]] * 3
    assert [back for _, back, _ in results] == [6] * 3
    assert [value for _, _, value in results] == [1.0, 1.0, None]


def test_a_set_has_no_id_after_shutdown_so_that_it_cannot_mean_another_one():
    def body(comm):
        hvd.init()
        old = hvd.add_process_set([0, 1])
        hvd.shutdown()
        assert old.process_set_id is None
        hvd.init()
        new = hvd.add_process_set([1, 2])
        assert new.process_set_id == 1
        with pytest.raises(hvd.InvalidRequestError, match="not registered"):
            hvd.allreduce(1.0, process_set=old)
        assert hvd.add_process_set(old).process_set_id == 2
        return total(comm.rank, old) if old.included() else None

    assert run_ranks(3, body, setup=runtime.as_rank) == [1.0, 1.0, None]


def test_all_objects_of_a_removed_set_lose_their_id():
    def body(comm):
        first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 0])
        hvd.init(process_sets=[first])
        hvd.init(process_sets=[second])
        assert first.process_set_id == second.process_set_id == 1
        assert hvd.remove_process_set(second)
        assert first.process_set_id is second.process_set_id is None
        assert hvd.remove_process_set(first) is False

    run_ranks(3, body, setup=runtime.as_rank)


def test_the_global_set_cannot_be_removed(on_ranks):
    assert on_ranks(2, lambda rank: hvd.remove_process_set(hvd.global_process_set)) == [False, False]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([0, 3], "from 0 to 2"),
        ([-1], "from 0 to 2"),
        ([1, 1], "twice"),
        ([], "at least one"),
        ([0, 1, 2], "set 0"),
        ([1, 0], "set 1"),
    ],
)
def test_ranks_that_cannot_be_a_set_are_refused_everywhere(on_ranks, ranks, words):
    def body(rank):
        hvd.add_process_set([0, 1])
        with pytest.raises(ValueError, match=words):
            hvd.add_process_set(ranks)
        return hvd.add_process_set([2]).process_set_id

    assert on_ranks(3, body) == [2] * 3


def test_ranks_that_differ_between_processes_are_refused_everywhere(on_ranks):
    def body(rank):
        with pytest.raises(ValueError, match="differs|Mismatched") as caught:
            hvd.add_process_set([0, 1] if rank else [0, 2])
        assert "[0, 2]" in str(caught.value)
        assert "[0, 1]" in str(caught.value)
        with pytest.raises(ValueError, match="from 0 to 2"):
            hvd.add_process_set([0, 1] if rank else [0, 7])
        return hvd.add_process_set([0, 1]).process_set_id

    assert on_ranks(3, body) == [1] * 3


def test_a_refused_removal_leaves_the_set_usable(on_ranks):
    def body(rank):
        one, other = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
        with pytest.raises(ValueError, match="Mismatched"):
            hvd.remove_process_set(one if rank else other)
        return (total(1, one) if rank < 2 else None), (total(1, other) if rank else None)

    assert on_ranks(3, body) == [(2.0, None), (2.0, 2.0), (None, 2.0)]


def test_an_outsider_is_told_so_and_the_members_are_not_disturbed(on_ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 2])
        x = np.ones(2)
        if rank == 1:
            calls = [
                lambda: hvd.allreduce(x, process_set=pair), lambda: hvd.allgather(x, process_set=pair),
                lambda: hvd.broadcast(x, 0, process_set=pair), lambda: hvd.alltoall(x, process_set=pair),
                lambda: hvd.reducescatter(x, process_set=pair), lambda: hvd.barrier(process_set=pair),
                lambda: hvd.join(process_set=pair), lambda: hvd.grouped_allreduce([x], process_set=pair),
                lambda: hvd.broadcast_object(1, 0, process_set=pair), lambda: hvd.allgather_object(1, process_set=pair),
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(ValueError, match=r"rank 1 is not in process set 1, whose ranks are \[0, 2\]"):
                    call()
            return None
        return [total(rank, pair, name="w") for _ in range(3)]

    assert on_ranks(3, body) == [[2.0] * 3, None, [2.0] * 3]


def test_roots_are_global_ranks(on_ranks):
    def body(rank):
        pair = hvd.add_process_set([1, 3])
        if not pair.included():
            return None
        with pytest.raises(hvd.InvalidRequestError, match=r"root_rank=0.*\[1, 3\]"):
            hvd.broadcast(np.ones(1), 0, process_set=pair)
        with pytest.raises(hvd.MismatchError, match=r"1 on rank 1; 3 on rank 3"):
            hvd.broadcast(np.ones(1), rank, name="differing", process_set=pair)
        return [
            int(hvd.broadcast(np.array([rank]), root, process_set=pair)[0]) for root in (1, 3)
        ], hvd.broadcast_object(rank, 3, process_set=pair)

    assert on_ranks(4, body) == [None, ([1, 3], 3), None, ([1, 3], 3)]


def test_every_operation_works_within_a_set(on_ranks):
    def body(rank):
        trio = hvd.add_process_set([0, 2, 3])
        if not trio.included():
            hvd.barrier()
            return None
        x = np.arange(3) + rank
        results = [
            hvd.allreduce(x, op=hvd.Sum, process_set=trio), hvd.allreduce(x * 1.0, process_set=trio),
            hvd.allgather(x[:1], process_set=trio), hvd.alltoall(x, process_set=trio),
            hvd.reducescatter(x, op=hvd.Sum, process_set=trio),
            hvd.grouped_allreduce([x], op=hvd.Max, process_set=trio)[0],
            np.array(hvd.allgather_object(rank, process_set=trio)),
        ]  # fmt: skip
        hvd.barrier(process_set=trio)
        hvd.barrier()
        return [result.tolist() for result in results]

    results = on_ranks(4, body)
    assert results[1] is None
    for place, rank in enumerate([0, 2, 3]):
        same = [
            [5, 8, 11],
            [5 / 3, 8 / 3, 11 / 3],
            [0, 2, 3],
            [place, 2 + place, 3 + place],
            [[5], [8], [11]][place],
            [3, 4, 5],
            [0, 2, 3],
        ]
        np.testing.assert_allclose(results[rank][1], same[1])
        assert results[rank][:1] + results[rank][2:] == same[:1] + same[2:]


# Several at once


def test_one_name_may_be_in_flight_in_two_sets(on_ranks):
    def body(rank):
        low, high = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
        sets = [s for s in (low, high, hvd.global_process_set) if s.included()]
        handles = [hvd.allreduce_async(np.array([rank + 1]), op=hvd.Sum, name="w", process_set=s) for s in sets]
        return [int(handle.wait()[0]) for handle in handles]

    assert on_ranks(3, body) == [[3, 6], [3, 5, 6], [5, 6]]


@pytest.mark.parametrize("seed", range(5))
def test_overlapping_sets_in_different_orders_never_block_each_other(on_ranks, seed):
    def body(rank):
        sets = [hvd.global_process_set, *(hvd.add_process_set(r) for r in ([0, 1], [1, 2], [0, 2, 3], [1, 3]))]
        mine = [s for s in sets if s.included()]
        rng = random.Random(seed * 10 + rank)
        for k in range(30):
            calls = [(s, name) for s in mine for name in ("a", "b")]
            rng.shuffle(calls)
            handles = []
            for s, name in calls:
                x = np.array([rank + k, s.process_set_id])
                handles.append((s, hvd.allreduce_async(x, op=hvd.Sum, name=name, process_set=s)))
            rng.shuffle(handles)
            for s, handle in handles:
                expected = [sum(r + k for r in s.ranks), s.process_set_id * len(s.ranks)]
                np.testing.assert_array_equal(handle.wait(), expected)

    on_ranks(4, body, timeout=60)


def test_blocking_calls_in_two_sets_may_cross_where_the_members_allow_it(on_ranks):
    # Ranks 0 and 1 meet in set A, 2 and 3 in B, 1 and 2 in C: a chain that only works if no set waits for another.
    def body(rank):
        a, b, c = (hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3], [1, 2]))
        out = []
        for _ in range(20):
            if rank == 1:
                handle = hvd.allreduce_async(1.0, op=hvd.Sum, name="c", process_set=c)
                out.append(total(1, a, "a"))
                handle.wait()
            elif rank == 2:
                out.append(total(1, c, "c"))
                total(1, b, "b")
            else:
                out.append(total(1, a if rank == 0 else b, "a" if rank == 0 else "b"))
        return out

    assert on_ranks(4, body) == [[2.0] * 20] * 4


def test_sets_may_come_and_go_while_others_work(on_ranks):
    def body(rank):
        for k in range(10):
            background = hvd.allreduce_async(np.array([k]), op=hvd.Sum, name="background")
            pair = hvd.add_process_set([k % 3, (k + 1) % 3])
            if pair.included():
                assert total(rank, pair) == k % 3 + (k + 1) % 3
            assert int(background.wait()[0]) == 3 * k
            assert hvd.remove_process_set(pair)

    on_ranks(3, body, timeout=60)


def test_what_is_pending_in_a_removed_set_fails(on_ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 1])
        handle = hvd.allreduce_async(np.ones(1), name="lonely", process_set=pair) if rank == 0 else None
        hvd.barrier()
        set_id = pair.process_set_id
        assert hvd.remove_process_set(pair)
        if handle is not None:
            with pytest.raises(hvd.ShutdownError, match=f"process set {set_id} has been shut down") as caught:
                handle.wait()
            assert "removed the process set" in str(caught.value)
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce(np.ones(1), process_set=pair)
        again = hvd.add_process_set([0, 1])
        assert again.process_set_id == set_id
        return total(1, again) if again.included() else None

    assert on_ranks(3, body) == [2.0, 2.0, None]


def test_a_set_of_one_rank_needs_nobody(on_ranks):
    def body(rank):
        alone = [hvd.add_process_set([r]) for r in range(2)][rank]
        x = np.arange(3.0)
        np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, process_set=alone), 2 * x)
        np.testing.assert_array_equal(hvd.allgather(x, process_set=alone), x)
        np.testing.assert_array_equal(hvd.alltoall(x, process_set=alone), x)
        assert hvd.join(process_set=alone) == rank

    on_ranks(2, body)


@pytest.mark.parametrize("ranks", [["a"], [0, None], [0.5], 3])
def test_ranks_that_are_none_on_one_rank_raise_on_all(on_ranks, ranks):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError):
            hvd.add_process_set(ranks if rank == 1 else [0, 1])
        return hvd.add_process_set([0, 1]).process_set_id

    assert on_ranks(3, body, timeout=10) == [1, 1, 1]


NO_SETS = {
    "broadcast_object": lambda ps: hvd.broadcast_object({"x": 1}, process_set=ps),
    "allgather_object": lambda ps: hvd.allgather_object(1, process_set=ps),
    "grouped_allgather": lambda ps: hvd.grouped_allgather([np.ones(2), np.ones(1)], process_set=ps),
    "reducescatter": lambda ps: hvd.reducescatter(np.ones(2), process_set=ps),
    "barrier": hvd.barrier,
    "remove_process_set": hvd.remove_process_set,
}


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("wrong", [None, 0, [1, 2]], ids=str)
@pytest.mark.parametrize("what", NO_SETS)
def test_what_is_no_process_set_on_one_rank_raises_on_all(on_ranks, what, wrong, odd):
    def body(rank):
        pair = hvd.add_process_set([0, 1])
        right = pair if what == "remove_process_set" else hvd.global_process_set
        errors = hvd.InvalidRequestError if rank == odd else (hvd.RemoteError, hvd.InvalidRequestError)
        with pytest.raises(errors, match=r"process_set=.*expected a ProcessSet"):
            NO_SETS[what](wrong if rank == odd else right)
        return hvd.allreduce(1.0, op=hvd.Sum).item(), pair.process_set_id

    assert on_ranks(3, body, timeout=10) == [(3.0, 1)] * 3


def test_a_join_without_a_process_set_is_no_join(on_ranks):
    def body(rank):
        if rank == 1:
            with pytest.raises(hvd.InvalidRequestError, match="expected a ProcessSet"):
                hvd.join(process_set=None)
            hvd.barrier(hvd.add_process_set([1]))
        else:
            hvd.add_process_set([1])
        hvd.join()
        return hvd.allreduce(1.0, op=hvd.Sum).item()

    assert on_ranks(3, body, timeout=10) == [3.0] * 3
