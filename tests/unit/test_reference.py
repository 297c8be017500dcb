"""The oracle against numbers worked out by hand, and against double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.collectives.adasum import adasum_tree
from hvdlite.collectives.reference import reduce_in_rank_order
from hvdlite.dtypes import BFLOAT16, SUPPORTED, ReduceOp, is_floating, name_of
from hvdlite.kernels import Finish


@pytest.mark.parametrize("dtype", [d for d in SUPPORTED.values() if is_floating(d)], ids=name_of)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_float_sums_are_close_to_double_precision(dtype: np.dtype[Any], n: int) -> None:
    values = [np.sin(np.arange(1000) + 10 * k).astype(dtype) for k in range(n)]
    right = sum(value.astype(np.float64) for value in values) / n
    found = reduce_in_rank_order(values, ReduceOp.SUM, 1.0, Finish(1 / n)).astype(np.float64)
    epsilon = float(np.finfo(dtype).eps) if dtype != BFLOAT16 else 2.0**-7
    np.testing.assert_allclose(found, right, rtol=epsilon, atol=8 * 2.0**-24 if dtype != np.float64 else 1e-15)


def test_integers_are_scaled_before_and_after_as_documented() -> None:
    values = [np.array([7, -7]), np.array([2, -2])]
    assert reduce_in_rank_order(values, ReduceOp.SUM, 0.5, Finish()).tolist() == [4, -4]
    assert reduce_in_rank_order(values, ReduceOp.SUM, 1.0, Finish(0.5)).tolist() == [4, -4]
    assert reduce_in_rank_order(values, ReduceOp.SUM, 1.0, Finish(1.0, 2)).tolist() == [4, -4]


def test_adasum_of_the_worked_example() -> None:
    np.testing.assert_array_equal(adasum_tree([np.array([1.0, 0.0]), np.array([1.0, 1.0])]), [1.25, 0.75])


def test_adasum_averages_equals_adds_orthogonals_and_ignores_zeros() -> None:
    g = np.array([3.0, -1.0, 2.0])
    np.testing.assert_allclose(adasum_tree([g, g]), g)
    np.testing.assert_allclose(adasum_tree([g] * 4), g)
    np.testing.assert_array_equal(adasum_tree([np.array([2.0, 0.0]), np.array([0.0, 5.0])]), [2.0, 5.0])
    np.testing.assert_array_equal(adasum_tree([g, np.zeros(3)]), g)


def test_adasum_combines_neighbours_and_folds_the_extra_ranks_first() -> None:
    a, b, c, d = (np.random.default_rng(k).standard_normal(5) for k in range(4))
    pair = adasum_tree
    np.testing.assert_array_equal(adasum_tree([a, b, c, d]), pair([pair([a, b]), pair([c, d])]))
    np.testing.assert_array_equal(adasum_tree([a, b, c]), pair([pair([a, c]), b]))
