"""allgather, broadcast, alltoall, barrier and objects through the public API."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import hvdlite as hvd

SIZES = [1, 2, 3, 4, 7]
NAMES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
NAMES += ["float16", "float32", "float64", "complex64", "complex128"]
DTYPES = [*map(np.dtype, NAMES), np.dtype(ml_dtypes.bfloat16)]


def block(rank, rows, dtype=np.dtype(np.int64), width=2):
    """Return rows that no other rank has."""
    return (np.arange(rows * width).reshape(rows, width) + 100 * rank).astype(dtype)


# Allgather


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "rows_of", [lambda r: 2, lambda r: r, lambda r: 3 * (r % 2), lambda r: 0], ids=["equal", "ragged", "gaps", "empty"]
)
def test_allgather_concatenates_in_rank_order(on_ranks, size, rows_of):
    expected = np.concatenate([block(r, rows_of(r)) for r in range(size)])
    for result in on_ranks(size, lambda rank: hvd.allgather(block(rank, rows_of(rank)))):
        assert result.shape == expected.shape
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allgather_moves_every_dtype_bit_by_bit(on_ranks, dtype):
    expected = np.concatenate([block(r, r + 1, dtype) for r in range(3)])
    for result in on_ranks(3, lambda rank: hvd.allgather(block(rank, rank + 1, dtype))):
        assert result.dtype == dtype
        assert result.tobytes() == expected.tobytes()


def test_nan_payloads_survive_a_move(on_ranks):
    odd = np.array([0x7FF8_0000_DEAD_BEEF], np.uint64).view(np.float64)
    for result in on_ranks(2, lambda rank: hvd.allgather(odd)):
        assert result.tobytes() == odd.tobytes() * 2


def test_allgather_takes_any_strides(on_ranks):
    expected = np.concatenate([block(r, 4)[::2, ::-1] for r in range(2)])
    for result in on_ranks(2, lambda rank: hvd.allgather(block(rank, 4)[::2, ::-1])):
        np.testing.assert_array_equal(result, expected)


def test_the_first_dimension_may_change_from_call_to_call(on_ranks):
    def body(rank):
        return [len(hvd.allgather(np.zeros((rank * k % 3, 2)), name="same")) for k in range(6)]

    expected = [sum(rank * k % 3 for rank in range(3)) for k in range(6)]
    assert on_ranks(3, body) == [expected] * 3


def test_grouped_allgather_gathers_each(on_ranks):
    def body(rank):
        return hvd.grouped_allgather([block(rank, rank), block(rank, 3 - rank, np.dtype(np.float16), 5)])

    for first, second in on_ranks(3, body):
        np.testing.assert_array_equal(first, np.concatenate([block(r, r) for r in range(3)]))
        np.testing.assert_array_equal(
            second, np.concatenate([block(r, 3 - r, np.dtype(np.float16), 5) for r in range(3)])
        )


# Broadcast


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (257, 33)])
def test_broadcast_gives_the_roots_values(on_ranks, size, shape):
    def body(rank):
        results = []
        for root in range(size):
            mine = np.full(shape, 10.0 * rank + root)
            results.append(hvd.broadcast(mine, root))
            np.testing.assert_array_equal(mine, np.full(shape, 10.0 * rank + root))  # untouched
            assert hvd.broadcast_(mine, root) is mine
            np.testing.assert_array_equal(mine, results[-1])
        return results

    for results in on_ranks(size, body):
        for root, result in enumerate(results):
            np.testing.assert_array_equal(result, np.full(shape, 11.0 * root))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_moves_every_dtype(on_ranks, dtype):
    for result in on_ranks(3, lambda rank: hvd.broadcast(block(rank, 5, dtype), 1)):
        assert result.dtype == dtype
        assert result.tobytes() == block(1, 5, dtype).tobytes()


def test_broadcast_in_place_fills_a_strided_view(on_ranks):
    def body(rank):
        base = block(rank, 6, width=4).astype(float)
        view = base[::2, 1::2]
        hvd.broadcast_(view, 2)
        np.testing.assert_array_equal(base[1::2], block(rank, 6, width=4)[1::2])
        return view

    for view in on_ranks(3, body):
        np.testing.assert_array_equal(view, block(2, 6, width=4)[::2, 1::2])


# Alltoall


def test_alltoall_by_splits_as_documented(on_ranks):
    # Rank r sends j + 1 rows to rank j.
    def body(rank):
        return hvd.alltoall(np.full((6, 2), rank), splits=[1, 2, 3])

    for j, (output, received) in enumerate(on_ranks(3, body)):
        np.testing.assert_array_equal(output[:, 0], np.repeat([0, 1, 2], j + 1))
        assert received.tolist() == [j + 1] * 3
        assert received.dtype == np.int32


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_sends_each_row_once_with_zeros_and_an_unsent_tail(on_ranks, size):
    splits = [[(r * 3 + j * 2) % 4 for j in range(size)] for r in range(size)]

    def body(rank):
        n = sum(splits[rank])
        rows = block(rank, n + rank)  # `rank` rows more than are sent
        return hvd.alltoall(rows, splits=np.array(splits[rank], np.int64))

    for j, (output, received) in enumerate(on_ranks(size, body)):
        parts = []
        for r in range(size):
            start = sum(splits[r][:j])
            parts.append(block(r, sum(splits[r]) + r)[start : start + splits[r][j]])
        np.testing.assert_array_equal(output, np.concatenate(parts))
        assert received.tolist() == [splits[r][j] for r in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_alltoall_without_splits_cuts_evenly_and_returns_the_array_alone(on_ranks, size):
    results = on_ranks(size, lambda rank: hvd.alltoall(block(rank, 2 * size)))
    for j, output in enumerate(results):
        np.testing.assert_array_equal(
            output, np.concatenate([block(r, 2 * size)[2 * j : 2 * j + 2] for r in range(size)])
        )


def test_alltoall_of_nothing(on_ranks):
    for output, received in on_ranks(3, lambda rank: hvd.alltoall(np.empty((0, 4), np.float32), splits=[0, 0, 0])):
        assert output.shape == (0, 4)
        assert received.tolist() == [0, 0, 0]
    for output in on_ranks(2, lambda rank: hvd.alltoall(np.empty((0, 3)))):
        assert output.shape == (0, 3)


def test_an_async_alltoall_always_gives_the_pair(on_ranks):
    def body(rank):
        output, received = hvd.synchronize(hvd.alltoall_async(np.arange(2) + rank))
        return output.tolist(), received.tolist()

    assert on_ranks(2, body) == [([0, 1], [1, 1]), ([1, 2], [1, 1])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alltoall_moves_every_dtype(on_ranks, dtype):
    for j, output in enumerate(on_ranks(2, lambda rank: hvd.alltoall(block(rank, 4, dtype)))):
        assert output.tobytes() == np.concatenate([block(r, 4, dtype)[2 * j : 2 * j + 2] for r in range(2)]).tobytes()


# Barrier


def test_nobody_leaves_a_barrier_before_all_have_entered(on_ranks):
    entered = [0] * 3
    for _ in range(5):

        def body(rank):
            for k in range(1, 6):
                entered[rank] = k
                hvd.barrier()
                assert min(entered) >= k
                hvd.barrier()

        on_ranks(3, body)


def test_two_threads_may_wait_in_barriers_at_once(on_ranks):
    def body(rank):
        done = []
        # One set is the runtime of the thread that plays the rank; the second thread gets a handle.
        handle = hvd.allreduce_async(np.ones(1), op=hvd.Sum, name="meanwhile")
        waiter = threading.Thread(target=lambda: done.append(handle.wait()))
        waiter.start()
        hvd.barrier()
        waiter.join(10)
        return float(done[0][0])

    assert on_ranks(2, body) == [2.0, 2.0]


# Objects


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("this one stays here")


@pytest.mark.parametrize("size", SIZES)
def test_objects_are_broadcast_from_every_root(on_ranks, size):
    def body(rank):
        return [
            hvd.broadcast_object({"from": rank, "größe": [None, 1.5]} if rank == root else None, root)
            for root in range(size)
        ]

    for results in on_ranks(size, body):
        assert results == [{"from": root, "größe": [None, 1.5]} for root in range(size)]


def test_the_root_keeps_its_own_object(on_ranks):
    objects = [[1], [2]]
    results = on_ranks(2, lambda rank: hvd.broadcast_object(objects[rank], 1))
    assert results[1] is objects[1]
    assert results[0] == objects[1]


def test_lambdas_and_large_objects_travel(on_ranks):
    def body(rank):
        double = hvd.broadcast_object((lambda x: 2 * x) if rank == 0 else None)
        large = hvd.broadcast_object(b"x" * 3_000_001 if rank == 0 else None)
        return double(21), len(large)

    assert on_ranks(2, body) == [(42, 3_000_001)] * 2


@pytest.mark.parametrize("size", SIZES)
def test_objects_are_gathered_in_rank_order(on_ranks, size):
    def body(rank):
        return hvd.allgather_object("x" * rank if rank % 2 else None, name="given"), hvd.allgather_object({rank})

    for texts, sets in on_ranks(size, body):
        assert texts == ["x" * r if r % 2 else None for r in range(size)]
        assert sets == [{r} for r in range(size)]


def test_an_object_that_cannot_be_pickled_raises_everywhere_and_the_next_call_works(on_ranks):
    def body(rank):
        expected = hvd.InvalidRequestError if rank == 1 else hvd.HorovodInternalError
        with pytest.raises(expected, match="Unpicklable cannot be pickled: RuntimeError: this one stays here") as first:
            hvd.broadcast_object(Unpicklable() if rank == 1 else None, root_rank=1)
        with pytest.raises(expected, match="Unpicklable cannot be pickled") as second:
            hvd.allgather_object(Unpicklable() if rank == 1 else rank)
        if rank != 1:
            assert "rank 1" in str(first.value)
            assert "rank 1" in str(second.value)
        return hvd.broadcast_object(rank, 1), hvd.allgather_object(rank)

    assert on_ranks(3, body) == [(1, [0, 1, 2])] * 3
