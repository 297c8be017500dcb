"""join(): ranks that have run out of data take part in what the others still do."""

from __future__ import annotations

import numpy as np
import pytest

import hvdlite as hvd


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_learn_who_joined_last(on_ranks, size):
    # Rank r does r operations more than rank 0, so the last rank joins last.
    def body(rank):
        for k in range(rank):
            hvd.allreduce(np.ones(1), name=f"t{k}")
        return hvd.join()

    assert on_ranks(size, body) == [size - 1] * size


def test_the_average_still_divides_by_the_full_size(on_ranks):
    def body(rank):
        results = []
        if rank != 1:
            results = [hvd.allreduce(np.array([6.0, -3.0]), name="f"), hvd.allreduce(np.array([7, -7]), name="i")]
        hvd.join()
        return results

    results = on_ranks(3, body)
    for rank in (0, 2):
        np.testing.assert_allclose(results[rank][0], [4.0, -2.0])
        np.testing.assert_array_equal(results[rank][1], [4, -4])  # 14 / 3, truncated


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint16, np.int64, np.float16, np.float32, np.float64], ids=lambda d: d.__name__
)
def test_a_joined_rank_changes_nothing_in_min_max_and_product(on_ranks, dtype):
    x = [np.array([3, 5], dtype), None, np.array([4, 2], dtype)]

    def body(rank):
        results = []
        if rank != 1:
            results = [
                hvd.allreduce(x[rank], op=op, name=op.name).tolist() for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Sum)
            ]
        hvd.join()
        return results

    results = on_ranks(3, body)
    assert results[0] == results[2] == [[3, 2], [4, 5], [12, 10], [7, 7]]


def test_bool_min_and_max_ignore_joined_ranks(on_ranks):
    def body(rank):
        results = []
        if rank == 0:
            results = [
                hvd.allreduce(np.array([True, False]), op=op, name=op.name).tolist()
                for op in (hvd.Min, hvd.Max, hvd.Product)
            ]
        hvd.join()
        return results

    assert on_ranks(2, body)[0] == [[True, False]] * 3


def test_complex_sums_and_products_ignore_joined_ranks(on_ranks):
    def body(rank):
        results = []
        if rank == 0:
            results = [hvd.allreduce(np.array([1 + 2j]), op=op, name=op.name)[0] for op in (hvd.Sum, hvd.Product)]
        hvd.join()
        return results

    assert on_ranks(2, body)[0] == [1 + 2j, 1 + 2j]


def test_the_other_operations_work_while_a_rank_has_joined(on_ranks):
    def body(rank):
        results = None
        if rank != 1:
            results = (
                hvd.allgather(np.full((rank + 1, 2), rank), name="gather"),
                hvd.alltoall(np.arange(6) + 10 * rank, splits=[3, 1, 2], name="all"),
                hvd.broadcast(np.full(3, rank), 2, name="cast"),
                hvd.reducescatter(np.arange(5), op=hvd.Sum, name="scatter"),
                hvd.grouped_allreduce([np.ones(2), np.ones(3)], op=hvd.Sum, name="group"),
                hvd.allreduce(np.array([1.0, 2.0]) * (rank + 1), op=hvd.Adasum, name="adasum"),
                hvd.allgather_object(rank, name="objects"),
            )
            hvd.barrier()
        hvd.join()
        return results

    results = on_ranks(3, body)
    for rank in (0, 2):
        gathered, (exchanged, received), cast, scattered, group, adasum, objects = results[rank]
        np.testing.assert_array_equal(gathered[:, 0], [0, 2, 2, 2])
        assert exchanged.tolist() == ([0, 1, 2, 20, 21, 22] if rank == 0 else [4, 5, 24, 25])
        assert received.tolist() == ([3, 0, 3] if rank == 0 else [2, 0, 2])
        assert cast.tolist() == [2, 2, 2]
        assert scattered.tolist() == ([0, 2] if rank == 0 else [8])
        assert [x.tolist() for x in group] == [[2, 2], [2, 2, 2]]
        np.testing.assert_allclose(adasum, [2, 4])  # parallel gradients are averaged: of 1x and 3x
        assert objects == [0, 2]


def test_a_joined_rank_cannot_be_the_root_and_the_others_hear_why(on_ranks):
    def body(rank):
        if rank != 1:
            with pytest.raises(hvd.HorovodInternalError, match="rank 1 has joined"):
                hvd.broadcast(np.ones(2), 1, name="w")
            assert hvd.allreduce(1.0, op=hvd.Sum, name="next") == 2.0
        return hvd.join()

    on_ranks(3, body)


def test_what_was_submitted_before_joining_counts(on_ranks):
    def body(rank):
        handle = hvd.allreduce_async(np.full(2, rank + 1.0), op=hvd.Sum, name="before")
        if rank == 0:
            last = hvd.join()
            return handle.wait().tolist(), last
        value = handle.wait().tolist()
        hvd.allreduce(np.ones(1), name="after")
        return value, hvd.join()

    results = on_ranks(3, body)
    assert [value for value, _ in results] == [[6.0, 6.0]] * 3
    assert results[0][1] in (1, 2)


def test_joining_again_works_and_so_do_cached_names_afterwards(on_ranks):
    def body(rank):
        seen = []
        for epoch in range(4):
            for step in range(3 + (rank + epoch) % 2):
                seen.append(float(hvd.allreduce(1.0, op=hvd.Sum, name=f"w{step}")))
            hvd.join()
            seen.append(float(hvd.allreduce(1.0, op=hvd.Sum, name="w0")))
        return seen

    for rank, seen in enumerate(on_ranks(2, body)):
        expected = []
        for epoch in range(4):
            steps = 3 + (rank + epoch) % 2
            expected += [2.0] * min(steps, 3) + [1.0] * (steps - 3) + [2.0]
        assert seen == expected


def test_ranks_of_a_process_set_join_among_themselves(on_ranks):
    def body(rank):
        odd = hvd.add_process_set([1, 2])
        result = None
        if odd.included():
            if rank == 2:
                result = float(hvd.allreduce(5.0, op=hvd.Sum, name="w", process_set=odd))
            assert hvd.join(process_set=odd) == 2  # global ranks
        return result

    assert on_ranks(3, body) == [None, None, 5.0]


@pytest.mark.parametrize("name", ["join", "join.noname", "hvdlite.join"])
def test_a_tensor_may_be_called_join(on_ranks, name):
    def body(rank):
        result = float(hvd.allreduce(3.0, op=hvd.Sum, name=name)) if rank == 0 else None
        hvd.join()
        return result, float(hvd.allreduce(1.0, op=hvd.Sum, name=name))

    assert on_ranks(2, body) == [(3.0, 2.0), (None, 2.0)]


@pytest.mark.parametrize("size", [2, 3])
def test_process_sets_change_while_a_rank_has_joined(on_ranks, size):
    def body(rank):
        if rank == 1:
            hvd.join()
            return None
        made = hvd.add_process_set([0])
        removed = hvd.remove_process_set(made)
        hvd.join()
        return removed

    assert on_ranks(size, body) == [None if rank == 1 else True for rank in range(size)]


def test_what_waits_for_its_name_comes_before_the_join(on_ranks):
    def body(rank):
        first = hvd.allreduce_async(np.full(4, rank + 1.0), op=hvd.Sum, name="x")
        second = hvd.allgather_async(np.full(3, float(rank)), name="x")
        if rank == 1:
            hvd.join()
            return first.wait().tolist(), second.wait().tolist()
        results = first.wait().tolist(), second.wait().tolist()
        hvd.join()
        return results

    assert on_ranks(2, body) == [([3.0] * 4, [0.0] * 3 + [1.0] * 3)] * 2


def test_calls_without_a_name_meet_again_after_uneven_loops_and_a_join(on_ranks):
    def body(rank):
        for _ in range(2 + rank):
            hvd.allreduce(np.ones(1))
        hvd.join()
        return hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum).item()

    assert on_ranks(3, body) == [6.0] * 3
