"""allreduce and reducescatter through the public API, against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import hvdlite as hvd

SIZES = [1, 2, 3, 4, 7]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(name) for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")]
FLOATS = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]
COMPLEX = [np.dtype("complex64"), np.dtype("complex128")]
REDUCE = {hvd.Sum: np.add, hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}


def values(rank, size, dtype, n=11):
    """Small whole numbers, different on every rank and at every place, so that sums and products are exact."""
    plain = (np.arange(n) * size + rank) % 5 + (rank % 2)
    if dtype.kind == "b":
        return plain % 3 == 0
    if dtype.kind in "ifV":
        plain = plain * np.where(np.arange(n) % 3 == 1, -1, 1)
    if dtype.kind == "c":
        plain = plain + 1j * (rank - np.arange(n) % 4)
    return plain.astype(dtype)


def reduced(size, dtype, op):
    """What all ranks should get: exact for integers, rounded once for floats."""
    everyone = [values(rank, size, dtype) for rank in range(size)]
    wide = [one.astype(np.float64) if dtype in FLOATS else one for one in everyone]
    with np.errstate(all="ignore"):
        if op == hvd.Average:
            total = np.add.reduce([one.astype(object) for one in wide])
            if dtype in INTEGERS:
                return np.array([abs(int(x)) // size * (1 if x >= 0 else -1) for x in total]).astype(dtype)
            return (total.astype(np.complex128 if dtype in COMPLEX else np.float64) / size).astype(dtype)
        total = wide[0]
        for one in wide[1:]:
            total = (np.logical_and if dtype.kind == "b" and op == hvd.Product else REDUCE[op])(total, one)
        return total.astype(dtype)


def same_on_all(results):
    for result in results[1:]:
        assert result.dtype == results[0].dtype
        assert result.tobytes() == results[0].tobytes()
    return results[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product], ids=lambda op: op.name)
def test_allreduce_is_numpys_reduction_for_every_dtype(on_ranks, size, op):
    dtypes = INTEGERS + FLOATS
    dtypes += COMPLEX if op not in (hvd.Min, hvd.Max) else []
    dtypes += [np.dtype(bool)] if op in (hvd.Min, hvd.Max, hvd.Product) else []

    def body(rank):
        return [hvd.allreduce(values(rank, size, dtype), op=op, name=str(dtype)) for dtype in dtypes]

    results = on_ranks(size, body)
    for i, dtype in enumerate(dtypes):
        result = same_on_all([mine[i] for mine in results])
        assert result.dtype == dtype
        expected = reduced(size, dtype, op)
        if op == hvd.Average and dtype not in INTEGERS:  # a product with 1/size, not a division
            error = np.abs(result.astype(np.complex128) - expected.astype(np.complex128))
            assert (error <= np.abs(expected.astype(np.complex128)) * 2.0 ** -(7 if dtype == BFLOAT16 else 10)).all()
        else:
            np.testing.assert_array_equal(result, expected)


def test_average_is_the_default(on_ranks):
    results = on_ranks(2, lambda rank: hvd.allreduce(np.array([1.0, 3.0]) * (rank + 1)))
    np.testing.assert_array_equal(same_on_all(results), [1.5, 4.5])


@pytest.mark.parametrize(("average", "expected"), [(True, 1.5), (False, 3.0)])
def test_average_is_horovods_old_way_to_choose(on_ranks, average, expected):
    with pytest.warns(DeprecationWarning, match=f"average={average} is deprecated; use op=hvd") as caught:
        assert on_ranks(2, lambda rank: float(hvd.allreduce(1.0 + rank, average=average))) == [expected] * 2
    assert {one.filename for one in caught} == {__file__}


def test_integer_averages_truncate_towards_zero(on_ranks):
    inputs = [np.array([1, 2, -1, -3], np.int32), np.array([2, 5, -2, 0], np.int32)]
    results = on_ranks(2, lambda rank: hvd.allreduce(inputs[rank]))
    np.testing.assert_array_equal(same_on_all(results), [1, 3, -1, -1])


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64])
@pytest.mark.parametrize(
    ("factor", "value"), [(0.5, 3), (0.1, 27), (2.5, 3), (-1.0, 3)] + [(f, v) for f in (0.3, 1.7) for v in (1, 9)]
)
def test_scaled_integers_truncate_after_each_factor(on_ranks, dtype, factor, value):
    if factor < 0 and dtype == np.uint8:
        value = 0  # what C does to negative values of unsigned types is undefined
    n, tensor = 3, np.array([value], dtype)

    def body(rank):
        return (
            hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=factor),
            hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=factor),
        )

    for pre, post in on_ranks(n, body):
        assert pre.tolist() == [n * int(factor * value)]
        assert post.tolist() == [int(factor * (n * value))]


def test_postscaling_an_integer_average_multiplies_once(on_ranks):
    # Horovod: trunc(sum * (postscale / size)). Dividing first would lose the half: 3 / 2 * 2 = 2.
    def body(rank):
        return hvd.allreduce(np.array([1 + rank, -1 - rank]), op=hvd.Average, postscale_factor=2.0)

    for result in on_ranks(2, body):
        np.testing.assert_array_equal(result, [3, -3])


def test_floats_are_scaled_in_float32(on_ranks):
    x = np.array([1.1, -2.3, 1e-3], np.float32)
    factor = 0.1  # not exact in float32

    def body(rank):
        return hvd.allreduce(x, op=hvd.Sum, prescale_factor=factor, postscale_factor=factor, name="f")

    scaled = x * np.float32(factor)
    expected = (scaled + scaled) * np.float32(factor)
    for result in on_ranks(2, body):
        assert result.tobytes() == expected.tobytes()


def test_doubles_are_scaled_in_double(on_ranks):
    x = np.array([1.1, -2.3, 1e-300])
    for result in on_ranks(2, lambda rank: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.1)):
        assert result.tobytes() == (x * 0.1 + x * 0.1).tobytes()


@pytest.mark.parametrize("dtype", [np.dtype("float16"), BFLOAT16], ids=str)
def test_half_types_add_in_float32_and_round_once(on_ranks, dtype):
    # In the half type itself 1 + tiny + tiny stays 1.
    tiny = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[str(dtype)]
    x = [np.array([1.0]), np.array([tiny]), np.array([tiny])]
    for result in on_ranks(3, lambda rank: hvd.allreduce(x[rank].astype(dtype), op=hvd.Sum)):
        assert float(result[0]) == 1 + 2 * tiny


def test_the_average_of_large_float16_does_not_overflow(on_ranks):
    x = np.full(3, 60000, np.float16)
    for result in on_ranks(4, lambda rank: hvd.allreduce(x)):
        np.testing.assert_array_equal(result, x)


def test_integer_sums_wrap(on_ranks):
    for result in on_ranks(3, lambda rank: hvd.allreduce(np.array([100, -100], np.int8), op=hvd.Sum)):
        np.testing.assert_array_equal(result, np.array([300, -300]).astype(np.int8))


def test_nan_and_infinity_pass_through(on_ranks):
    x = [np.array([np.nan, 1, np.inf, -np.inf]), np.array([2, np.nan, 1, np.inf])]
    for op in (hvd.Sum, hvd.Min, hvd.Max):
        for result in on_ranks(2, lambda rank, op=op: hvd.allreduce(x[rank], op=op)):
            assert np.isnan(result[:2]).all()
            assert np.isnan(result[3]) == (op == hvd.Sum)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 5)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_shape_comes_back(on_ranks, shape, size):
    def body(rank):
        tensor = np.array(np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) + rank)
        new = hvd.allreduce(tensor, op=hvd.Sum)
        same = hvd.allreduce_(tensor, op=hvd.Sum)
        assert same is tensor
        np.testing.assert_array_equal(new, same)
        return new

    expected = np.arange(int(np.prod(shape))).reshape(shape) * size + size * (size - 1) / 2
    for result in on_ranks(size, body):
        assert result.shape == shape
        np.testing.assert_array_equal(result, expected)


def test_the_input_is_not_changed_and_the_result_does_not_share_its_memory(on_ranks):
    def body(rank):
        tensor = np.arange(5.0) + rank
        before = tensor.copy()
        result = hvd.allreduce(tensor, op=hvd.Sum)
        np.testing.assert_array_equal(tensor, before)
        assert not np.shares_memory(tensor, result)

    on_ranks(2, body)
    on_ranks(1, body)


def strided_views():
    base = np.arange(48.0).reshape(4, 12)
    return {
        "transposed": base.T,
        "every other": base[:, ::2],
        "backwards": base[::-1],
        "fortran": np.asfortranarray(base),
        "a column": base[:, 3],
    }


@pytest.mark.parametrize("name", list(strided_views()))
def test_in_place_works_for_any_strides(on_ranks, name):
    def body(rank):
        view = strided_views()[name]
        whole = view.base if view.base is not None else view
        outside = whole.sum() - view.sum()
        view += rank
        assert hvd.allreduce_(view, op=hvd.Sum) is view
        np.testing.assert_array_equal(view, strided_views()[name] * 3 + 3)
        assert whole.sum() - view.sum() == outside
        return np.ascontiguousarray(hvd.allreduce(strided_views()[name] + rank, op=hvd.Max))

    for result in on_ranks(3, body):
        np.testing.assert_array_equal(result, strided_views()[name] + 2)


def test_big_endian_arrays_are_read_right(on_ranks):
    for result in on_ranks(2, lambda rank: hvd.allreduce(np.array([1, 256], ">i4"), op=hvd.Sum)):
        np.testing.assert_array_equal(result, [2, 512])
        assert result.dtype == np.int32


@pytest.mark.parametrize(
    "make", [lambda x: [x, x + 1], lambda x: (x, x + 1), lambda x: np.float64(x), lambda x: x, lambda x: [[x], [x + 1]]]
)
def test_lists_and_numbers_are_accepted(on_ranks, make):
    for result in on_ranks(3, lambda rank: hvd.allreduce(make(1.5 + rank), op=hvd.Sum)):
        expected = np.asarray(make(0.0)) * 3 + 7.5
        np.testing.assert_array_equal(result, expected)


def test_objects_that_speak_dlpack_are_accepted_and_written_to(on_ranks):
    import torch

    def body(rank):
        tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3) + rank
        result = hvd.allreduce(tensor, op=hvd.Sum, name="new")
        assert isinstance(result, np.ndarray)
        returned = hvd.allreduce_(tensor, op=hvd.Max, name="same")
        assert returned is tensor
        return result, tensor.numpy()

    for result, tensor in on_ranks(2, body):
        np.testing.assert_array_equal(result, np.arange(6).reshape(2, 3) * 2 + 1)
        np.testing.assert_array_equal(tensor, np.arange(6).reshape(2, 3) + 1)


# Groups


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_reduces_each_tensor(on_ranks, size):
    dtypes = [np.float32, np.int64, np.float16, np.float32]

    def body(rank):
        tensors = [np.full((i, 2), rank + i, dtype) for i, dtype in enumerate(dtypes)]
        new = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        same = hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="in place")
        assert all(a is b for a, b in zip(same, tensors, strict=True))
        return new, same

    for new, same in on_ranks(size, body):
        assert isinstance(new, list)
        for i, dtype in enumerate(dtypes):
            for result in (new[i], same[i]):
                assert result.dtype == dtype
                np.testing.assert_array_equal(result, np.full((i, 2), sum(range(size)) + i * size))


def test_groups_and_singles_may_be_submitted_in_any_order(on_ranks):
    def body(rank):
        start = {
            "g": lambda: hvd.grouped_allreduce_async([np.full(2, rank), np.full(3, rank)], op=hvd.Sum, name="g"),
            "h": lambda: hvd.grouped_allreduce_async([np.full(5, rank), np.full(1, rank)], op=hvd.Max, name="h"),
            "x": lambda: hvd.allreduce_async(np.full(4, rank), op=hvd.Min, name="x"),
        }
        order = ["ghx", "xhg", "hxg"][rank]
        handles = {name: start[name]() for name in order}
        return [np.concatenate(handles["g"].wait()), np.concatenate(handles["h"].wait()), handles["x"].wait()]

    for g, h, x in on_ranks(3, body):
        np.testing.assert_array_equal(g, np.full(5, 3))
        np.testing.assert_array_equal(h, np.full(6, 2))
        np.testing.assert_array_equal(x, np.zeros(4))


# Reducescatter


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 23])
def test_reducescatter_gives_the_first_ranks_one_row_more(on_ranks, size, rows):
    def body(rank):
        tensor = np.arange(rows * 3, dtype=np.float64).reshape(rows, 3) * size + rank
        return (
            hvd.reducescatter(tensor, op=hvd.Sum),
            hvd.reducescatter(tensor),
            hvd.reducescatter(tensor[:, 0], op=hvd.Sum),
        )

    whole = np.arange(rows * 3).reshape(rows, 3) * size**2 + size * (size - 1) // 2
    bounds = np.cumsum([0, *(rows // size + (r < rows % size) for r in range(size))])
    for rank, (total, mean, column) in enumerate(on_ranks(size, body)):
        mine = whole[bounds[rank] : bounds[rank + 1]]
        assert total.shape == mine.shape
        np.testing.assert_array_equal(total, mine)
        np.testing.assert_allclose(mean, mine / size, rtol=1e-15)
        np.testing.assert_array_equal(column, mine[:, 0])


def test_reducescatter_cuts_seven_rows_into_three_two_two(on_ranks):
    assert [len(x) for x in on_ranks(3, lambda rank: hvd.reducescatter(np.ones((7, 2))))] == [3, 2, 2]
    assert [len(x) for x in on_ranks(3, lambda rank: hvd.reducescatter(np.ones((2, 2))))] == [1, 1, 0]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *COMPLEX], ids=str)
def test_reducescatter_takes_every_dtype_that_can_be_added(on_ranks, dtype):
    results = on_ranks(3, lambda rank: hvd.reducescatter(values(rank, 3, dtype), op=hvd.Sum))
    np.testing.assert_array_equal(np.concatenate(results), reduced(3, dtype, hvd.Sum))


def test_reducescatter_scales_before_and_after(on_ranks):
    def body(rank):
        return hvd.reducescatter(np.arange(4) + 3, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)

    once = (np.arange(4) + 3) // 2
    np.testing.assert_array_equal(np.concatenate(on_ranks(2, body)), (once * 2 * 1.5).astype(int))


def test_grouped_reducescatter_returns_the_rows_of_each(on_ranks):
    def body(rank):
        return hvd.grouped_reducescatter([np.arange(5.0) + rank, np.ones((2, 2))], op=hvd.Sum)

    results = on_ranks(2, body)
    np.testing.assert_array_equal(np.concatenate([r[0] for r in results]), np.arange(5) * 2 + 1)
    np.testing.assert_array_equal(np.concatenate([r[1] for r in results]), np.full((2, 2), 2))


# Adasum


def test_adasum_follows_its_rule_per_tensor(on_ranks):
    def body(rank):
        return hvd.grouped_allreduce(
            [
                np.array([[1.0, 0.0], [1.0, 1.0]][rank]),
                np.array([2.0, 3.0]),
                np.array([0.0, 5.0][rank:] + [0.0] * rank),
            ],
            op=hvd.Adasum,
        )

    for mixed, equal, orthogonal in on_ranks(2, body):
        np.testing.assert_allclose(mixed, [1.25, 0.75])
        np.testing.assert_allclose(equal, [2, 3])
        np.testing.assert_allclose(orthogonal, [5, 5])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_adasum_of_equal_tensors_is_the_tensor(on_ranks, size, dtype):
    x = np.array([1.0, -2.0, 0.5], dtype)
    for result in on_ranks(size, lambda rank: hvd.allreduce(x, op=hvd.Adasum)):
        np.testing.assert_array_equal(result, x)


# Same bits


def random_tensors(rank):
    rng = np.random.default_rng(1234 + rank)
    lengths = [1, 3, 16, 17, 100, 1023, 4096, 5000]
    kinds = [np.float32, np.float32, np.float16, BFLOAT16, np.float64]
    return [
        (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4)).astype(kinds[i % 5]) for i, n in enumerate(lengths * 2)
    ]


def reduce_all_at_once(rank):
    handles = [hvd.allreduce_async(t, name=f"t{i}") for i, t in enumerate(random_tensors(rank))]
    return b"".join(handle.wait().tobytes() for handle in handles)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bits_do_not_depend_on_fusion(on_ranks, monkeypatch, size):
    seen = set()
    for threshold in ("0", "64", ""):
        monkeypatch.setenv("HVDLITE_FUSION_THRESHOLD", threshold)
        seen.update(on_ranks(size, reduce_all_at_once))
    assert len(seen) == 1


def test_the_bits_are_the_same_on_all_ranks_and_over_repeats(on_ranks):
    results = on_ranks(3, lambda rank: {reduce_all_at_once(rank) for _ in range(20)})
    assert len(set.union(*results)) == 1


@pytest.mark.parametrize("backend", ["auto", "ring", "tree", "reference"])
@pytest.mark.parametrize("hosts", [None, ["a", "a", "b"], ["a", "b", "c"]])
def test_every_backend_serves_the_public_api(on_ranks, monkeypatch, backend, hosts):
    monkeypatch.setenv("HVDLITE_BACKEND", backend)

    def body(rank):
        tensor = np.arange(50_001.0) * 3 + rank
        total = hvd.allreduce(tensor, op=hvd.Sum)
        rows = hvd.reducescatter(tensor, op=hvd.Sum)
        return total, rows, hvd.allgather(tensor[: rank + 1]), hvd.broadcast(tensor, 2), hvd.backend_reasons()

    results = on_ranks(3, body, hosts=hosts)
    for total, _, gathered, broadcast, reasons in results:
        np.testing.assert_array_equal(total, np.arange(50_001) * 9 + 3)
        np.testing.assert_array_equal(gathered, [0, 1, 4, 2, 5, 8])
        np.testing.assert_array_equal(broadcast, np.arange(50_001) * 3 + 2)
        assert set(reasons) == {"allreduce", "reducescatter", "allgather", "broadcast"}
        assert all(reasons.values())
    np.testing.assert_array_equal(np.concatenate([r[1] for r in results]), np.arange(50_001) * 9 + 3)
