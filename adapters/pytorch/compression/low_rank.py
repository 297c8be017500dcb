"""Orthonormal columns, and products of thin matrices, with the same bits on every machine. Pure.

Ranks compute these from equal numbers, and parameters drift apart unless they get equal results. Matrix products
and torch's sums do not promise that: they add up in an order that depends on the processor and on the number of
threads. What is here only multiplies and adds element by element, which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import math

import torch

# Below this share of its squared length, what remains of a column after the others is noise.
_NOISE = 1e-10


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns that span those of each of b matrices, for few columns.

    A column that depends on those before it becomes 0. Where a matrix is not finite, so is the result.

    Args:
        columns: b × n × r, floating-point.
    """
    exact = columns.double()
    # By Cholesky's factors of the products of columns: float64 has the digits that squaring float32 takes.
    factors = [_inverse_of_cholesky(gram) for gram in _products_of_columns(exact).tolist()]
    c = torch.tensor(factors, dtype=torch.float64).view(len(factors), 1, columns.shape[2], columns.shape[2])
    result = exact[:, :, 0:1] * c[:, :, 0]
    for j in range(1, columns.shape[2]):
        result += exact[:, :, j : j + 1] * c[:, :, j]
    return result.to(columns.dtype)


def outer(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """Fill `out`, b × n × m, with left · rightᵀ, for few columns.

    Args:
        left: b × n × r.
        right: b × m × r.
        scratch: like `out`. Not used for r = 1.
    """
    rows = right.transpose(1, 2).contiguous()
    torch.mul(left[:, :, 0:1], rows[:, 0:1], out=out)
    for j in range(1, left.shape[2]):
        out += torch.mul(left[:, :, j : j + 1], rows[:, j : j + 1], out=scratch)


def _products_of_columns(x: torch.Tensor) -> torch.Tensor:
    """Return xᵀx of each matrix, summed in pairs of halves."""
    products = x.unsqueeze(3) * x.unsqueeze(2)
    n = x.shape[1]
    while n > 1:
        half = n // 2
        products[:, :half] += products[:, n - half : n]
        n -= half
    return products[:, 0]


def _inverse_of_cholesky(gram: list[list[float]]) -> list[list[float]]:
    """Return C, upper triangular, so that the columns of x·C are orthonormal, where xᵀx = `gram`."""
    r = len(gram)
    if not all(math.isfinite(value) for row in gram for value in row):
        return [[math.nan] * r] * r
    basis: list[list[float]] = []  # columns of C
    for k in range(r):
        # Gram and Schmidt, on coefficients: the k-th column without its parts along those before.
        column = [float(i == k) for i in range(r)]
        for done in basis:
            along = sum(done[i] * gram[i][k] for i in range(r))
            column = [mine - along * other for mine, other in zip(column, done, strict=True)]
        squared = sum(column[i] * gram[i][j] * column[j] for i in range(r) for j in range(r))
        # Not above also where rounding made it negative.
        length = math.sqrt(squared) if squared > _NOISE * gram[k][k] else math.inf
        basis.append([value / length for value in column])
    return [list(row) for row in zip(*basis, strict=True)]
