"""Torch's sums of half types against the built-in ones, bit by bit."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.dtypes import ReduceOp
from hvdlite.kernels import Finish, Kernels
from hvdlite.torch.kernels import BLOCK, HalfSums

sum_halves = HalfSums()
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
# Subnormals, the edge of float16, ties between neighbours, signed zeros, infinities.
SPECIAL = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-11, 6e-8, -6e-8, 65504.0, -65504.0, 1e38, -1e38, np.inf, -np.inf, 1 / 3]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request):
    """Torch's threads: where it has but one, blocks are longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def numbers(n, dtype, seed):
    random = np.random.default_rng(seed)
    wide = random.standard_normal(n) * 10.0 ** random.integers(-7, 5, n)
    wide[: min(n, len(SPECIAL))] = SPECIAL[:n]
    with np.errstate(over="ignore"):
        return random.permutation(wide).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, BLOCK, 4 * BLOCK + 5])
@pytest.mark.parametrize("n_sources", [1, 2, 3, 7])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.0, 0.5), (1.0, 1 / 3), (0.3, 1.0), (1 / 7, 7.0)])
def test_both_kernels_give_the_same_bits(dtype, n, n_sources, factors):
    sources = [numbers(n, dtype, seed) for seed in range(n_sources)]
    expected, actual = np.empty(n, dtype), np.empty(n, dtype)
    Kernels().reduce(ReduceOp.SUM, sources, expected, factors[0], Finish(factors[1]))
    sum_halves(sources, actual, *factors)
    wide = expected.astype(np.float32)
    is_nan = np.isnan(wide)  # of inf - inf; a NaN has no one bit pattern
    assert np.array_equal(np.isnan(actual.astype(np.float32)), is_nan)
    assert np.array_equal(actual.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_the_result_may_replace_a_source(dtype, place, factor):
    sources = [numbers(BLOCK + 3, dtype, seed) for seed in range(3)]
    sources = [np.nan_to_num(source.astype(np.float32), posinf=1, neginf=1).astype(dtype) for source in sources]
    expected = np.empty_like(sources[0])
    sum_halves(sources, expected, 1.0, factor)
    sum_halves(sources, sources[place], 1.0, factor)
    assert np.array_equal(sources[place].view(np.uint16), expected.view(np.uint16))


def test_what_was_first_averaged_in_inference_mode_is_averaged_outside_of_it():
    average, out = HalfSums(), np.empty(3, np.float16)
    sources = [np.array([1, 2, 3], np.float16), np.array([3, 2, 1], np.float16)]
    with torch.inference_mode():
        average(sources, out, 1.0, 0.5)
    average(sources, out, 1.0, 0.5)
    assert out.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sources_may_be_read_only(dtype):
    sources = [np.arange(5).astype(dtype), (10 * np.arange(5)).astype(dtype)]
    for source in sources:
        source.flags.writeable = False
    out = np.empty(5, dtype)
    sum_halves(sources, out, 1.0, 1.0)
    sum_halves(sources, out, 1.0, 0.5)
    assert out.astype(float).tolist() == [0.0, 5.5, 11.0, 16.5, 22.0]


def test_init_registers_them(ranks, monkeypatch):
    called = []

    def note(self, sources, out, prescale, factor):
        called.append(len(sources))
        sum_halves(sources, out, prescale, factor)

    monkeypatch.setattr("hvdlite.torch.kernels.HalfSums", lambda: functools.partial(note, None))
    import torch

    def body(rank):
        return hvd.allreduce(torch.full((5,), rank + 1, dtype=torch.bfloat16), op=hvd.Sum).tolist()

    assert ranks(2, body) == [[3.0] * 5] * 2
    assert called
