"""Element arithmetic against plain NumPy, ml_dtypes' casts and C's rules."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from hvdlite.dtypes import BFLOAT16, SUPPORTED, ReduceOp, is_floating, name_of
from hvdlite.kernels import Finish, Kernels

HALVES = [SUPPORTED["float16"], BFLOAT16]
INTEGERS = [dtype for dtype in SUPPORTED.values() if dtype.kind in "iu"]
BLOCK = 8  # elements; lengths around it exercise the edges of blocks
LENGTHS = [0, 1, 7, 8, 9, 100]


@pytest.fixture
def kernels() -> Kernels:
    return Kernels(BLOCK)


def made(number: int, length: int, dtype: np.dtype[Any]) -> Any:
    steps = np.arange(length) * 7 + 31 * number + 1
    return (np.sin(steps) * 9 if is_floating(dtype) or dtype.kind == "c" else steps % 120).astype(dtype)


def every_float32_that_matters() -> Any:
    """Return all sign, exponent and upper mantissa bits, with low bits below, at and above every tie."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    low = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    return np.concatenate([upper | np.uint32(bits) for bits in low]).view(np.float32)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_every_half_widens_exactly(dtype: np.dtype[Any]) -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for block in (1 << 16, 64):  # in one block with infinities and NaN, and most of it without
        wide = np.empty(half.size, np.float32)
        Kernels(block).widen(half, wide)
        right = half.astype(np.float32)
        np.testing.assert_array_equal(wide, right)
        assert (np.signbit(wide) == np.signbit(right))[~np.isnan(right)].all()


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_narrowing_rounds_to_nearest_even_like_the_plain_cast(dtype: np.dtype[Any]) -> None:
    wide = every_float32_that_matters()
    with np.errstate(all="ignore"):
        right = wide.astype(dtype)
    for block in (1 << 16, 64):
        half = np.empty(wide.size, dtype)
        Kernels(block).narrow(wide, half)
        nan = np.isnan(wide)
        assert np.isnan(half[nan].astype(np.float32)).all()
        np.testing.assert_array_equal(half[~nan].view(np.uint16), right[~nan].view(np.uint16))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", SUPPORTED.values(), ids=name_of)
def test_reduce_combines_from_first_to_last(kernels: Kernels, dtype: np.dtype[Any], op: ReduceOp) -> None:
    if (dtype.kind, op) == ("b", ReduceOp.SUM) or (dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX)):
        return  # refused by dtypes.check_reducible
    ufunc = {ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}[
        op
    ]
    wide = np.float32 if dtype in HALVES else dtype
    for length in LENGTHS:
        for n in (1, 2, 3, 5):
            sources = [made(k, length, dtype) for k in range(n)]
            total = sources[0].astype(wide)
            for source in sources[1:]:
                total = ufunc(total, source.astype(wide))
            out = np.empty(length, dtype)
            kernels.reduce(op, sources, out)
            assert out.tobytes() == total.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", [SUPPORTED["float32"], BFLOAT16, SUPPORTED["int32"]], ids=name_of)
def test_out_may_be_any_of_the_sources(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    for finish in (Finish(), Finish(0.25)):
        for n in (1, 2, 3, 4):
            right = np.empty(100, dtype)
            kernels.reduce(ReduceOp.SUM, [made(k, 100, dtype) for k in range(n)], right, 0.5, finish)
            for alias in range(n):
                sources = [made(k, 100, dtype) for k in range(n)]
                kernels.reduce(ReduceOp.SUM, sources, sources[alias], 0.5, finish)
                assert sources[alias].tobytes() == right.tobytes()


@pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
def test_integer_sums_wrap_like_c(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    largest = np.iinfo(dtype).max
    out = np.empty(3, dtype)
    kernels.reduce(ReduceOp.SUM, [np.full(3, largest, dtype), np.array([0, 1, 2], dtype)], out)
    assert out.tolist() == [largest, np.iinfo(dtype).min, np.iinfo(dtype).min + 1]


def test_integers_scale_in_double_and_truncate_towards_zero(kernels: Kernels) -> None:
    source = np.array([-5, -3, -1, 0, 1, 3, 5, 2**31 - 1], np.int32)
    out = np.empty_like(source)
    kernels.scale(source, out, 0.5)
    assert out.tolist() == [-2, -1, 0, 0, 0, 1, 2, 2**30 - 1]
    assert source[0] == -5


def test_each_contribution_is_truncated_before_the_sum(kernels: Kernels) -> None:
    # horovod-api.md, appendix B: n * trunc(f * t)
    out = np.empty(1, np.int64)
    kernels.reduce(ReduceOp.SUM, [np.array([3]), np.array([-3]), np.array([5])], out, prescale=0.5)
    assert out.tolist() == [1 - 1 + 2]


@pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
@pytest.mark.parametrize("divisor", [2, 3, 49, 127, 128, 129, 200, 256, 1000])
def test_divisor_divides_exactly_and_truncates(kernels: Kernels, dtype: np.dtype[Any], divisor: int) -> None:
    limits = np.iinfo(dtype)
    near = [limits.min, limits.min + 1, 0, 1, 48, 49, 50, 98, limits.max - 1, limits.max]
    near += [-1, -48, -49, -50] if limits.min else []
    array = np.array(near, dtype)
    kernels.finish(array, Finish(1.0, divisor))
    assert array.tolist() == [abs(value) // divisor * (-1 if value < 0 else 1) for value in near]


def test_average_of_the_worked_example(kernels: Kernels) -> None:
    out = np.empty(3, np.int32)
    kernels.reduce(
        ReduceOp.SUM, [np.array([1, 2, -1], np.int32), np.array([2, 5, -2], np.int32)], out, 1.0, Finish(1.0, 2)
    )
    assert out.tolist() == [1, 3, -1]


def test_float32_factor_is_rounded_to_float32_first(kernels: Kernels) -> None:
    source, out = made(1, 100, SUPPORTED["float32"]), np.empty(100, np.float32)
    kernels.scale(source, out, 0.1)
    np.testing.assert_array_equal(out, source * np.float32(0.1))
    assert (out != (source.astype(np.float64) * 0.1).astype(np.float32)).any()


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_halves_are_rounded_once_after_the_finish(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    sources = [made(k, 100, dtype) for k in range(4)]
    out = np.empty(100, dtype)
    kernels.reduce(ReduceOp.SUM, sources, out, 0.3, Finish(0.7))
    wide = sources[0].astype(np.float32) * np.float32(0.3)
    for source in sources[1:]:
        wide = wide + source.astype(np.float32) * np.float32(0.3)
    np.testing.assert_array_equal(out.view(np.uint16), (wide * np.float32(0.7)).astype(dtype).view(np.uint16))


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("n_sources", [2, 3, 7, 64])
def test_an_average_of_halves_is_off_by_one_rounding_and_little_more(
    kernels: Kernels, dtype: np.dtype[Any], n_sources: int
) -> None:
    # Rounding every partial sum to the half type would be off by up to `n_sources` roundings.
    random = np.random.default_rng(n_sources)
    sources = [
        (random.standard_normal(5001) * 10.0 ** random.integers(-3, 3, 5001)).astype(dtype) for _ in range(n_sources)
    ]
    out = np.empty(5001, dtype)
    kernels.reduce(ReduceOp.SUM, sources, out, 1.0, Finish(1 / n_sources))
    wide = np.stack([source.astype(np.float64) for source in sources])
    exact, magnitude = wide.mean(axis=0), np.abs(wide).mean(axis=0)
    half_step, least = (2.0**-8, 2.0**-134) if dtype == BFLOAT16 else (2.0**-11, 2.0**-25)
    inexact = (n_sources + 1) * 2.0**-24 * magnitude  # of the sums and the product in float32
    error = np.abs(out.astype(np.float64) - exact)
    assert (error <= np.maximum(half_step * (np.abs(exact) + inexact), least) + inexact).all()
    assert error.max() > 0


def test_float16_average_does_not_overflow_on_the_way(kernels: Kernels) -> None:
    out = np.empty(20, np.float16)
    kernels.reduce(ReduceOp.SUM, [np.full(20, 60000, np.float16)] * 4, out, 1.0, Finish(0.25))
    assert (out == 60000 // 32 * 32).all()


def test_overflow_is_infinity_and_no_warning(kernels: Kernels) -> None:
    for dtype in (SUPPORTED["float32"], SUPPORTED["float16"]):
        large = np.full(20, np.finfo(dtype).max, dtype)
        kernels.combine(ReduceOp.SUM, large, large.copy())
        assert np.isinf(large).all()


@pytest.mark.parametrize("dtype", [d for d in SUPPORTED.values() if is_floating(d)], ids=name_of)
def test_nan_propagates_through_minimum_and_maximum(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        for clean_first in (True, False):
            clean, dirty = np.ones(20, dtype), np.ones(20, dtype)
            dirty[3] = np.nan
            out = np.empty(20, dtype)
            kernels.reduce(op, (clean, dirty) if clean_first else (dirty, clean), out)
            assert np.flatnonzero(np.isnan(out)).tolist() == [3]


def test_complex_scaling_keeps_the_other_part(kernels: Kernels) -> None:
    array = np.array([complex(np.inf, 1), complex(2, -3)], np.complex64)
    kernels.scale(array, array, 0.5)
    assert array.tolist() == [complex(np.inf, 0.5), complex(1, -1.5)]


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", SUPPORTED.values(), ids=name_of)
def test_identity_changes_nothing(kernels: Kernels, dtype: np.dtype[Any], op: ReduceOp) -> None:
    if (dtype.kind, op) == ("b", ReduceOp.SUM) or (dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX)):
        return
    if dtype.kind == "b":
        source = np.array([True, False])
    elif is_floating(dtype):
        source = np.array([-np.inf, -3, 0, 2, np.inf], dtype)
    elif dtype.kind == "c":
        source = np.array([1 - 2j, 0, 3j], dtype)
    else:
        source = np.array([np.iinfo(dtype).min, 0, 1, np.iinfo(dtype).max], dtype)
    out = np.empty_like(source)
    kernels.reduce(op, [source, np.full_like(source, kernels.identity(op, dtype))], out)
    np.testing.assert_array_equal(out, source)


def test_registered_kernel_takes_over_its_dtype_and_operation(kernels: Kernels) -> None:
    calls = []

    def fused(sources: Any, out: Any, prescale: float, factor: float) -> None:
        calls.append((len(sources), prescale, factor))
        out[:] = 7

    kernels.register(BFLOAT16, ReduceOp.SUM, fused)
    sources, out = [made(k, 5, BFLOAT16) for k in range(3)], np.empty(5, BFLOAT16)
    kernels.reduce(ReduceOp.SUM, sources, out, 0.5, Finish(0.25))
    assert calls == [(3, 0.5, 0.25)]
    assert (out == 7).all()
    kernels.reduce(ReduceOp.MAX, sources, out)
    assert len(calls) == 1


def test_steady_state_allocates_nothing() -> None:
    kernels = Kernels()
    sources = [made(k, 1 << 17, BFLOAT16) for k in range(3)]
    out = np.empty(1 << 17, BFLOAT16)
    kernels.reduce(ReduceOp.SUM, sources, out, 0.5, Finish(0.5))
    tracemalloc.start()
    try:
        for _ in range(5):
            kernels.reduce(ReduceOp.SUM, sources, out, 0.5, Finish(0.5))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000, f"{peak} bytes; a block of float32 would be 262144"
