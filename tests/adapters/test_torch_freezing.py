"""Parameters that are frozen at any time, on all ranks or on one: no rank waits for ever, and ranks stay equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

LAYOUTS = pytest.mark.parametrize(
    "options",
    [{}, {"groups": 1}, {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": True, "groups": 2}],
    ids=["own", "group", "views", "two buffers"],
)
OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])


def parameters(n, length=2):
    return [nn.Parameter(torch.full((length,), float(i))) for i in range(n)]


def wrapped(params, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)


def backward(params, rank):
    """Add (i + 1) * (rank + 1) to the gradient of parameter i."""
    sum((p * (i + 1) * (rank + 1)).sum() for i, p in enumerate(params)).backward()


def gradients(params):
    return [None if p.grad is None else p.grad[0].item() for p in params]


def values(params):
    return [p[0].item() for p in params]


@LAYOUTS
@OPS
def test_gradients_may_be_clipped_in_the_step_in_which_a_layer_was_frozen(ranks, options, op):
    factor = 3.0 if op == hvd.Sum else 1.5

    def body(rank):
        params = parameters(4)
        optimizer = wrapped(params, op=op, **options)

        def step(expected):
            optimizer.zero_grad()
            backward(params, rank)
            assert gradients(params) == expected
            norm = nn.utils.clip_grad_norm_(params, 0.5).item()
            assert norm == pytest.approx(sum(2 * (g or 0.0) ** 2 for g in expected) ** 0.5)
            before = values(params)
            optimizer.step()
            for old, new, g in zip(before, values(params), expected, strict=True):
                assert old - new == pytest.approx((g or 0.0) * 0.5 / norm, rel=1e-3)

        step([factor, 2 * factor, 3 * factor, 4 * factor])
        for p in params[:2]:
            p.requires_grad_(False)
        for _ in range(2):
            step([None, None, 3 * factor, 4 * factor])
        for p in params[:2]:
            p.requires_grad_(True)
        step([factor, 2 * factor, 3 * factor, 4 * factor])

    ranks(2, body, timeout=5.0)


@LAYOUTS
@OPS
@pytest.mark.parametrize("user", [0, 1])
def test_what_one_rank_used_may_be_frozen_before_the_step(ranks, user, options, op):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params, op=op, **options)
        for _ in range(3):
            optimizer.zero_grad()
            backward(params if rank == user else params[:1], rank)
            params[1].requires_grad_(False)
            optimizer.step()
        return values(params)

    once = 2.0 * (user + 1) * (1.0 if op == hvd.Sum else 0.5)
    total = 3 * (3.0 if op == hvd.Sum else 1.5)
    assert ranks(2, body, timeout=5.0) == [[-total, 1 - once]] * 2


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("options", [{"groups": 1}, {"groups": 2}, {"groups": 1, "gradient_as_bucket_view": True}])
@pytest.mark.parametrize("size", [2, 3])
def test_a_member_of_a_group_that_is_frozen_on_one_rank_counts_as_zero_there(ranks, frozen, options, size):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, op=hvd.Sum, **options)
        params[frozen].requires_grad_(rank != 0)
        for _ in range(3):
            optimizer.zero_grad()
            backward(params, rank)
            optimizer.step()
            total = size * (size + 1) / 2
            expected = [total * (i + 1) for i in range(3)]
            expected[frozen] -= frozen + 1
            assert gradients(params) == expected
        return values(params)

    first, *others = ranks(size, body, timeout=5.0)
    assert all(other == first for other in others)


@LAYOUTS
@OPS
@pytest.mark.parametrize("further", [False, True], ids=["step", "second pass"])
def test_an_accumulated_gradient_is_reduced_though_its_parameter_was_frozen_since(ranks, options, op, further):
    factor = 3.0 if op == hvd.Sum else 1.5

    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, op=op, backward_passes_per_step=2, **options)
        backward(params, rank)
        params[0].requires_grad_(False)
        if further:
            backward(params, rank)
        optimizer.step()
        twice = factor * (1 + further)
        assert gradients(params) == [factor, 2 * twice, 3 * twice]
        assert values(params) == [-factor, 1 - 2 * twice, 2 - 3 * twice]
        optimizer.zero_grad()
        for _ in range(2):
            backward(params, rank)
        assert gradients(params) == [None, 4 * factor, 6 * factor]
        optimizer.step()
        assert values(params)[0] == -factor

    ranks(2, body, timeout=5.0)
