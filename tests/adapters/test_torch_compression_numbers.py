"""The mathematics of compression, without ranks: int8 blocks, largest entries, orthonormal columns."""

from __future__ import annotations

import math

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.torch.compression import low_rank
from hvdlite.torch.compression.quantise import pack, quantise, restore, unpack
from hvdlite.torch.compression.topk import take_largest


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_int8_is_off_by_at_most_a_254th_of_the_largest_of_the_block(dtype, scale):
    blocks = random(5, 64, dtype=dtype) * torch.tensor([1.0, 1e-3, 1e3, 1.0, 0.0]).unsqueeze(1) * scale
    numbers, scales = quantise(blocks)
    assert numbers.dtype is torch.int8
    error = (restore(numbers, scales, torch.empty_like(blocks)) - blocks).abs()
    assert (error <= blocks.abs().amax(1, keepdim=True) / 254 * (1 + 1e-5)).all()
    assert numbers.abs().amax(1).tolist() == [127, 127, 127, 127, 0]


def test_int8_restores_the_largest_and_zeros_exactly():
    blocks = torch.tensor([[0.0, 127.0, -127.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(restore(*quantise(blocks), torch.empty_like(blocks)), blocks)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_int8_of_what_is_not_finite_is_not_finite_in_its_block_alone(value):
    blocks = random(3, 8)
    blocks[1, 3] = value
    restored = restore(*quantise(blocks), torch.empty_like(blocks))
    assert restored.isfinite().all(1).tolist() == [True, False, True]


def test_int8_takes_numbers_for_zero_whose_inverse_would_overflow():
    blocks = torch.full((1, 8), 1e-44)
    assert torch.equal(restore(*quantise(blocks), torch.empty_like(blocks)), torch.zeros(1, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 3])
def test_bytes_come_apart_as_they_were_put_together(n, dtype):
    numbers, scales = quantise(random(6, 16, dtype=dtype))
    rows = pack(numbers, scales, n)
    assert rows.shape == (n, 6 // n * (16 + dtype.itemsize))
    parts = [unpack(row, 6 // n, dtype) for row in rows]
    assert torch.equal(torch.cat([part[0] for part in parts]), numbers)
    assert torch.equal(torch.cat([part[1] for part in parts]), scales)


# Largest


def test_the_largest_of_each_block_are_taken_and_the_others_stay():
    blocks = torch.tensor([[1.0, -9.0, 3.0, 0.5], [0.25, 0.0, -0.125, 8.0]])
    values, where = take_largest(blocks, 2)
    taken = torch.zeros(2, 4).scatter_(1, where, values)
    assert taken.tolist() == [[0.0, -9.0, 3.0, 0.0], [0.25, 0.0, 0.0, 8.0]]
    assert blocks.tolist() == [[1.0, 0.0, 0.0, 0.5], [0.0, 0.0, -0.125, 0.0]]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_among_the_largest(value):
    blocks = random(1, 50)
    blocks[0, 20] = value
    _, where = take_largest(blocks, 1)
    assert where.item() == 20


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.01, 0.0003, 1e-6])
@pytest.mark.parametrize("n", [1, 7, 1000, 100_001])
def test_the_share_that_is_sent_is_the_ratio(ratio, n):
    hook = hvd.Compression.topk(ratio)
    length = hook.length(n, 3)
    blocks, n_sent = hook.cut(torch.zeros(length))
    assert n <= length < n + blocks.shape[1] <= n + 2**15
    assert n_sent == 1 or abs(n_sent - ratio * blocks.shape[1]) <= 0.5


# Orthonormal columns


@pytest.mark.parametrize(("b", "n", "r"), [(1, 1, 1), (3, 2, 2), (2, 7, 4), (5, 1000, 3), (1, 63, 32)])
def test_columns_are_orthonormal_and_span_the_same(b, n, r):
    columns = random(b, n, r)
    result = low_rank.orthonormal(columns).double()
    torch.testing.assert_close(
        result.transpose(1, 2) @ result, torch.eye(r).double().expand(b, r, r), atol=1e-6, rtol=0
    )
    # What is projected onto the span of the result is what it was.
    projected = result @ (result.transpose(1, 2) @ columns.double())
    torch.testing.assert_close(projected, columns.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_dependent_columns_become_zero(scale):
    a, b = random(2, 9)
    columns = torch.stack([torch.zeros(9), a, 2 * a, b, a - b], dim=1).unsqueeze(0) * scale
    result = low_rank.orthonormal(columns)[0]
    torch.testing.assert_close(result.norm(dim=0), torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]))


def test_one_matrix_that_is_not_finite_does_not_spoil_the_others():
    columns = random(3, 5, 2)
    columns[1, 2, 1] = math.inf
    assert low_rank.orthonormal(columns).isfinite().all(2).all(1).tolist() == [True, False, True]


def test_columns_do_not_depend_on_who_else_is_in_the_batch_nor_on_threads():
    columns = random(4, 3001, 3)
    together = low_rank.orthonormal(columns)
    torch.set_num_threads(3)  # the fixture sets it back
    assert torch.equal(together, low_rank.orthonormal(columns))
    assert torch.equal(together, torch.cat([low_rank.orthonormal(one.unsqueeze(0)) for one in columns]))


@pytest.mark.parametrize("r", [1, 2, 4])
def test_outer_is_the_matrix_product(r):
    left, right = random(3, 5, r), random(3, 7, r, seed=1)
    out = torch.empty(3, 5, 7)
    low_rank.outer(left, right, out, torch.empty_like(out))
    torch.testing.assert_close(out, left @ right.transpose(1, 2))


# Arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hvd.Compression.int8(block_size=0), r"int8\(block_size=0\): expected a positive multiple of 8"),
        (lambda: hvd.Compression.int8(12), r"block_size=12"),
        (lambda: hvd.Compression.int8(True), r"block_size=True"),
        (lambda: hvd.Compression.int8(8.0), r"block_size=8.0"),
        (lambda: hvd.Compression.topk(0), r"topk\(ratio=0\): expected a number above 0 and at most 1, such as 0.01"),
        (lambda: hvd.Compression.topk(1.5), r"ratio=1.5"),
        (lambda: hvd.Compression.topk(math.nan), r"ratio=nan"),
        (lambda: hvd.Compression.topk("0.1"), r"ratio='0.1'"),
        (lambda: hvd.Compression.powersgd(rank=0), r"powersgd\(rank=0\): expected a whole number from 1 to 32"),
        (lambda: hvd.Compression.powersgd(33), r"rank=33"),
        (lambda: hvd.Compression.powersgd(2.0), r"rank=2.0"),
    ],
)
def test_wrong_settings_raise_where_they_are_given(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_hooks_are_equal_if_their_settings_are():
    assert hvd.Compression.topk(0.1) == hvd.Compression.topk(0.1) != hvd.Compression.topk(0.2)
    assert len({hvd.Compression.int8(), hvd.Compression.int8(256), hvd.Compression.powersgd(2)}) == 2
