"""Allreduces so small that their values travel with the counters: the bits are those of asking first."""

import ml_dtypes
import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import runtime

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROUNDS = 8  # of which the first few are negotiated, and the last are enclosed
CASES = [
    ("float32", {"op": hvd.Sum}),
    ("float32", {"op": hvd.Average, "prescale_factor": 1 / 3, "postscale_factor": 0.7}),
    ("float64", {"op": hvd.Product}),
    ("float16", {"op": hvd.Average}),
    (BFLOAT16, {"op": hvd.Sum, "prescale_factor": 0.1}),
    ("int32", {"op": hvd.Average}),
    ("int8", {"op": hvd.Sum, "prescale_factor": 2.5}),
    ("complex64", {"op": hvd.Sum, "postscale_factor": 0.3}),
    ("bool", {"op": hvd.Min}),
    ("float32", {"op": hvd.Max}),
]


def apart(size):
    return [f"h{rank}" for rank in range(size)]


def values(rank, length, dtype):
    """Return values whose sums round, the same each time, different for each rank."""
    random = np.random.default_rng([rank, length])
    if dtype == "bool":
        return random.random(length) < 0.6
    if np.dtype(dtype).kind == "i":
        return random.integers(-40, 40, length).astype(dtype)
    return (random.standard_normal(length) * (1 + 0.3j if dtype == "complex64" else 1)).astype(dtype)


def is_enclosed():
    return "travel with the news" in hvd.backend_reasons()["allreduce"]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 37])
def test_bits_are_those_of_the_negotiated_way(on_ranks, size, length):
    def body(rank):
        found = []
        for number, (dtype, how) in enumerate(CASES):
            seen = set()
            for turn in range(ROUNDS):
                result = hvd.allreduce(values(rank, length, dtype), name=f"x{number}", **how)
                if turn == 0:
                    assert not is_enclosed()
                seen.add(result.tobytes())
            assert is_enclosed()
            found.append(seen)
        return found

    results = on_ranks(size, body, hosts=apart(size))
    for number, case in enumerate(CASES):
        assert len(set.union(*(result[number] for result in results))) == 1, case


@pytest.mark.parametrize(
    ("size", "length", "dtype", "expected"),
    [
        (4, 1024, "float32", True), (4, 1025, "float32", False),
        (2, 1024, "float16", True), (2, 1025, "float16", False),
        (8, 3, "float32", True), (9, 3, "float32", False), (3, 0, "float32", False), (1, 3, "float32", False),
    ],
)  # fmt: skip
def test_only_tiny_ones_of_few_ranks_are_enclosed(on_ranks, size, length, dtype, expected):
    def body(rank):
        for _ in range(ROUNDS):
            result = hvd.allreduce(np.full(length, rank + 1, dtype), op=hvd.Sum, name="x")
            assert (result == size * (size + 1) // 2).all() and result.size == length
        return is_enclosed()

    assert on_ranks(size, body, hosts=apart(size)) == [expected] * size


def test_what_is_no_single_sum_is_not_enclosed(on_ranks):
    def body(rank):
        for turn in range(ROUNDS):
            assert hvd.broadcast(np.full(3, rank + turn), 1, name="b").tolist() == [1 + turn] * 3
            hvd.allreduce(np.full(3, 1.0 + rank), op=hvd.Adasum, name="adasum")
            assert not is_enclosed()
            handles = [hvd.allreduce_async(np.full(5, float(rank)), op=hvd.Sum, name=f"{n}") for n in range(3)]
            assert [hvd.synchronize(handle).tolist() for handle in handles] == [[1.0] * 5] * 3
            assert not is_enclosed()
        return runtime.current().engine_of(0).is_scheduled

    assert on_ranks(2, body, hosts=apart(2)) == [True, True]


def test_many_at_once_meet_their_own_values(on_ranks):
    # Each is a batch of its own, because at first the caller waited for each.
    def body(rank):
        for step in range(20):
            handles = []
            for n in range(5):
                values = np.arange(4.0) + 100 * n + 1000 * step + 7 * rank
                handles.append(hvd.allreduce_async_(values, op=hvd.Sum, name=f"{n}"))
                if step < 5:
                    hvd.synchronize(handles[-1])
            for n, handle in enumerate(handles):
                expected = 3 * (np.arange(4.0) + 100 * n + 1000 * step) + 21
                if step >= 5:
                    np.testing.assert_array_equal(hvd.synchronize(handle), expected)
        return is_enclosed()

    assert on_ranks(3, body, hosts=apart(3)) == [True] * 3


def test_deviations_lose_nothing(on_ranks):
    def body(rank):
        for step in range(60):
            value = np.full(6, float(rank + 10 * step))
            first = hvd.allreduce_async(value, op=hvd.Sum, name="x")
            if step % 9 == 8 and rank == step % 3:  # beyond the schedule, while "x" may be under way
                odd = hvd.allreduce_async(value, op=hvd.Sum, name=f"odd{step}")
            assert hvd.synchronize(first).tolist() == [3.0 + 30 * step] * 6
            if step % 9 == 8:
                if rank != step % 3:
                    odd = hvd.allreduce_async(value, op=hvd.Sum, name=f"odd{step}")
                assert hvd.synchronize(odd).tolist() == [3.0 + 30 * step] * 6
            if step % 11 == 10:
                with pytest.raises(hvd.HvdliteError):
                    hvd.allreduce(np.zeros(6 + rank), op=hvd.Sum, name="x")
        return True

    assert on_ranks(3, body, hosts=apart(3)) == [True] * 3
