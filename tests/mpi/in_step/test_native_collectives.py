"""MPI's own collectives, and the ways around its counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvdlite.dtypes import BFLOAT16, SUPPORTED, ReduceOp

NUMPY = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}
LIMITS = pytest.mark.parametrize("limit", [2**31 - 1, 100, 7])


def values(comm, rank, n, dtype):
    """Small, so that products of them fit everywhere, and different on each rank and for each neighbour."""
    return ((np.arange(n) * 7 + rank) % 3).astype(dtype)


def native(comm, limit):
    found = comm.native
    found.limit = limit
    return found


@LIMITS
@pytest.mark.parametrize("op", list(NUMPY))
@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_allreduce_is_numpys(comm, name, op, limit):
    dtype, mpi = SUPPORTED[name], native(comm, limit)
    for n in (0, 1, 5, 1001) if mpi.supports(dtype, op) else ():
        check_allreduce(comm, mpi, dtype, op, n)


def check_allreduce(comm, mpi, dtype, op, n):
    array = values(comm, comm.rank, n, dtype)
    mpi.allreduce(array, op)
    expected = values(comm, 0, n, dtype)
    for rank in range(1, comm.size):
        expected = NUMPY[op](expected, values(comm, rank, n, dtype)).astype(dtype)
    np.testing.assert_array_equal(array, expected)


def test_what_mpi_would_get_wrong_is_not_supported(comm):
    mpi = comm.native
    assert all(not mpi.supports(dtype, op) for dtype in (BFLOAT16, SUPPORTED["float16"]) for op in ReduceOp)
    assert not mpi.supports(SUPPORTED["float32"], ReduceOp.MIN)  # NaN
    assert not mpi.supports(SUPPORTED["complex64"], ReduceOp.MAX)
    assert not mpi.supports(SUPPORTED["bool"], ReduceOp.SUM)
    assert all(not mpi.supports(dtype, ReduceOp.ADASUM) for dtype in SUPPORTED.values())
    assert not mpi.supports(SUPPORTED["int8"], ReduceOp.SUM)  # saturated by Open MPI 5.0.11
    for name in ("float32", "float64", "int32", "uint64", "complex128"):
        assert mpi.supports(SUPPORTED[name], ReduceOp.SUM)


@LIMITS
@pytest.mark.parametrize("scale", [0, 1, 13])
@pytest.mark.parametrize("name", ["float32", "bool", "int32"])
def test_reducescatter_leaves_each_rank_its_piece(comm, name, scale, limit):
    dtype = SUPPORTED[name]
    op = ReduceOp.MAX if name == "bool" else ReduceOp.SUM
    counts = [scale * (rank % 3) + (rank == 1) for rank in range(comm.size)]
    total, start = sum(counts), sum(counts[: comm.rank])
    target = np.zeros(counts[comm.rank], dtype)
    native(comm, limit).reducescatter(values(comm, comm.rank, total, dtype), counts, target, op)
    everyone = [values(comm, rank, total, dtype) for rank in range(comm.size)]
    expected = (np.max(everyone, axis=0) if name == "bool" else np.sum(everyone, axis=0)).astype(dtype)
    np.testing.assert_array_equal(target, expected[start : start + target.size])


@LIMITS
@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_broadcast_takes_every_root_and_dtype(comm, name, limit):
    dtype = SUPPORTED[name]
    for root, n in itertools.product(range(comm.size), (0, 1, 1001)):
        array = values(comm, comm.rank, n, dtype)
        native(comm, limit).broadcast(array, root)
        np.testing.assert_array_equal(array, values(comm, root, n, dtype))


@LIMITS
@pytest.mark.parametrize("scale", [0, 1, 13])
@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_allgather_joins_pieces_of_different_lengths(comm, name, scale, limit):
    dtype = SUPPORTED[name]
    counts = [scale * (rank % 3) + (rank == 1) for rank in range(comm.size)]
    target = np.zeros(sum(counts), dtype)
    native(comm, limit).allgather(values(comm, comm.rank, counts[comm.rank], dtype), counts, target)
    np.testing.assert_array_equal(target, np.concatenate([values(comm, r, n, dtype) for r, n in enumerate(counts)]))


@LIMITS
@pytest.mark.parametrize("scale", [0, 1, 13])
@pytest.mark.parametrize("name", ["float64", "bfloat16", "bool"])
def test_alltoall_sends_each_rank_its_piece(comm, name, scale, limit):
    dtype = SUPPORTED[name]

    def length(source, dest):
        return scale * ((source + 2 * dest) % 3)

    def piece(source, dest):
        return values(comm, source * comm.size + dest, length(source, dest), dtype)

    ranks = range(comm.size)
    target = np.zeros(sum(length(rank, comm.rank) for rank in ranks), dtype)
    native(comm, limit).alltoall(
        np.concatenate([piece(comm.rank, rank) for rank in ranks]),
        [length(comm.rank, rank) for rank in ranks],
        target,
        [length(rank, comm.rank) for rank in ranks],
    )
    np.testing.assert_array_equal(target, np.concatenate([piece(rank, comm.rank) for rank in ranks]))
