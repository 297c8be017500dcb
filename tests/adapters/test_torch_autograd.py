"""Gradients through the operations (values of the compatibility reference, and numerical checks)."""

from __future__ import annotations

import pytest
import torch

import hvdlite.torch as hvd

SIZES = [1, 2, 3, 4]


def leaf(*shape, rank=0, dtype=torch.float64):
    return (torch.rand(*shape, dtype=dtype) + rank).requires_grad_()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "factor"), [(hvd.Sum, lambda n: n), (hvd.Average, lambda n: 1)])
def test_allreduce_reduces_the_gradient_in_the_same_way(ranks, size, op, factor):
    def body(rank):
        x = leaf(3, 2, rank=rank)
        hvd.allreduce(x, op=op).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3, 2), float(factor(size)), dtype=torch.float64))

    ranks(size, body)


def test_factors_scale_the_gradient_too(ranks):
    def body(rank):
        x = leaf(4)
        hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((4,), 3.0, dtype=torch.float64))

    ranks(2, body)


def test_gradients_of_different_ranks_are_added(ranks):
    def body(rank):
        x = leaf(3)
        (hvd.allreduce(x, op=hvd.Sum) * (rank + 1)).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3,), 6.0, dtype=torch.float64))

    ranks(3, body)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum])
def test_operators_without_a_gradient_say_so(ranks, op):
    def body(rank):
        y = hvd.allreduce(leaf(2, rank=rank), name="x", op=op)
        with pytest.raises(hvd.InvalidRequestError, match=f"'x': op={type(hvd.Sum)(op).name.title()} has no gradient"):
            y.sum().backward()

    ranks(2, body)


def test_no_grad_builds_no_graph(ranks):
    def body(rank):
        with torch.no_grad():
            assert not hvd.allreduce(leaf(2)).requires_grad
        assert not hvd.allreduce(torch.ones(2)).requires_grad
        assert hvd.allreduce(leaf(2)).requires_grad

    ranks(2, body)


def test_a_grouped_allreduce_reduces_all_gradients(ranks):
    def body(rank):
        x, y = leaf(2), leaf(3)
        a, b = hvd.grouped_allreduce([x, y], op=hvd.Sum)
        (a.sum() * 2).backward()  # b has no gradient: zeros travel for it
        torch.testing.assert_close(x.grad, torch.full((2,), 4.0, dtype=torch.float64))
        torch.testing.assert_close(y.grad, torch.zeros(3, dtype=torch.float64))
        assert b.requires_grad

    ranks(2, body)


@pytest.mark.parametrize("size", SIZES)
def test_allgather_returns_the_mean_of_what_ranks_say_about_our_block(ranks, size):
    # Rank r weights the block of rank b with 10 r + b + 1; blocks are ragged, that of rank 1 is empty.
    rows = [0 if r == 1 else r + 1 for r in range(size)]

    def body(rank):
        x = leaf(rows[rank], 2)
        whole = hvd.allgather(x)
        weights = torch.cat([torch.full((n, 2), 10.0 * rank + b + 1) for b, n in enumerate(rows)])
        (whole * weights).sum().backward()
        expected = sum(10.0 * r + rank + 1 for r in range(size)) / size
        torch.testing.assert_close(x.grad, torch.full((rows[rank], 2), expected, dtype=torch.float64))

    ranks(size, body)


def test_grouped_allgather_slices_each_member(ranks):
    def body(rank):
        x, y = leaf(rank + 1), leaf(2, 2)
        a, b = hvd.grouped_allgather([x, y])
        (a.sum() + 3 * b.sum()).backward()
        torch.testing.assert_close(x.grad, torch.ones(rank + 1, dtype=torch.float64))
        torch.testing.assert_close(y.grad, torch.full((2, 2), 3.0, dtype=torch.float64))

    ranks(2, body)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_the_root_the_mean_and_others_nothing(ranks, size):
    def body(rank):
        root = size - 1
        x = leaf(3, rank=rank)
        (hvd.broadcast(x, root) * (rank + 1)).sum().backward()
        expected = (size + 1) / 2 if rank == root else 0.0
        torch.testing.assert_close(x.grad, torch.full((3,), expected, dtype=torch.float64))

    ranks(size, body)


def test_alltoall_sends_gradients_back_to_where_rows_came_from(ranks):
    def body(rank):
        x = leaf(7, 2)
        output, received = hvd.alltoall(x, [1, 2, 3])  # the seventh row stays
        assert not received.requires_grad
        (output * (rank + 1)).sum().backward()
        expected = torch.tensor([1.0, 2, 2, 3, 3, 3, 0], dtype=torch.float64)
        torch.testing.assert_close(x.grad, expected.unsqueeze(1).expand(7, 2))

    ranks(3, body)


def test_alltoall_without_splits_is_differentiable(ranks):
    def body(rank):
        x = leaf(4)
        (hvd.alltoall(x) * (rank + 1)).sum().backward()
        torch.testing.assert_close(x.grad, torch.tensor([1.0, 1, 2, 2], dtype=torch.float64))

    ranks(2, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "factor"), [(hvd.Sum, lambda n: n), (hvd.Average, lambda n: 1)])
def test_reducescatter_gathers_the_gradient(ranks, size, op, factor):
    def body(rank):
        x = leaf(7, 2)
        mine = hvd.reducescatter(x, op=op, prescale_factor=2.0)
        given = torch.full_like(mine, rank + 1.0)
        kept = given.clone()
        mine.backward(given)
        assert torch.equal(given, kept)  # Horovod scales it in place
        rows = [7 // size + (r < 7 % size) for r in range(size)]
        expected = torch.cat([torch.full((n, 2), 2.0 * factor(size) * (r + 1)) for r, n in enumerate(rows)])
        torch.testing.assert_close(x.grad, expected.double())

    ranks(size, body)


def test_grouped_reducescatter_gathers_each_gradient(ranks):
    def body(rank):
        x, y = leaf(3), leaf(2)
        a, b = hvd.grouped_reducescatter([x, y], op=hvd.Average)
        (a.sum() + b.sum() * 2).backward()
        torch.testing.assert_close(x.grad, torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(y.grad, torch.full((2,), 2.0, dtype=torch.float64))

    ranks(2, body)


def test_compression_lets_the_gradient_through(ranks):
    def body(rank):
        x = leaf(3, dtype=torch.float32)
        y = hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum)
        assert y.dtype == torch.float32
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3,), 2.0))

    ranks(2, body)


def test_gradients_can_be_differentiated_again(ranks):
    def body(rank):
        x = torch.tensor([2.0 + rank], dtype=torch.float64, requires_grad=True)
        y = (hvd.allreduce(x, op=hvd.Sum) ** 3).sum()  # of s = 2 + 3
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        torch.testing.assert_close(first, torch.tensor([2 * 3 * 25.0], dtype=torch.float64))
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, torch.tensor([4 * 6 * 5.0], dtype=torch.float64))

    ranks(2, body)


def test_backward_order_may_differ_from_forward_order(ranks):
    # Unnamed forward operations: the n-th meets the n-th, and so do their gradients.
    def body(rank):
        x, y = leaf(2), leaf(2)
        a, b = hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(y, op=hvd.Sum)
        (b * 3).sum().backward()
        (a * 5).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2,), 10.0, dtype=torch.float64))
        torch.testing.assert_close(y.grad, torch.full((2,), 6.0, dtype=torch.float64))

    ranks(2, body)
