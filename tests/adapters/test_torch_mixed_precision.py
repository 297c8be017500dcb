"""GradScaler, clipping and half types act on reduced gradients, in the order that scripts for one process use."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

INFINITE = float("inf")
VIEWS = pytest.mark.parametrize("views", [{}, {"gradient_as_bucket_view": True}], ids=["own", "views"])


def parameters(n=2, length=3):
    return [nn.Parameter(torch.full((length,), float(i))) for i in range(n)]


def loss_of(params, rank, factor=1.0):
    """Its gradient is factor * (i + 1) * (rank + 1) for parameter i."""
    return sum((p * (i + 1) * (rank + 1) * factor).sum() for i, p in enumerate(params))


def gradients(params):
    return [None if p.grad is None else p.grad[0].item() for p in params]


def clipped(reduced, length=3, max_norm=1.0):
    norm = (length * sum(x**2 for x in reduced)) ** 0.5
    return [x * min(1.0, max_norm / norm) for x in reduced]


# Clipping


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("passes", [1, 2])
@VIEWS
def test_clipping_before_step_sees_reduced_gradients(ranks, size, passes, views):
    def body(rank):
        params = parameters()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=1.0), backward_passes_per_step=passes, **views
        )  # fmt: skip
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(passes):
                loss_of(params, rank).backward()
            reduced = [passes * (i + 1) * (size + 1) / 2 for i in range(2)]
            assert gradients(params) == pytest.approx(reduced)
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            assert gradients(params) == pytest.approx(clipped(reduced), rel=1e-5)
        return [p.tolist() for p in params]

    weights = ranks(size, body)
    assert all(other == weights[0] for other in weights)
    assert weights[0][0][0] == pytest.approx(-2 * clipped([1.0, 2.0])[0], rel=1e-5)


@pytest.mark.parametrize("form", ["norm", "value", "out of place", "no foreach"])
def test_gradients_changed_after_backward_are_those_of_the_step(ranks, form):
    def body(rank):
        params = parameters()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum)
        loss_of(params, rank).backward()
        if form in ("norm", "no foreach"):
            nn.utils.clip_grad_norm_(params, 1.0, foreach=form == "norm")
        elif form == "value":
            nn.utils.clip_grad_value_(params, 2.5)
        else:
            for p in params:
                p.grad = p.grad / 4
        optimizer.step()
        return [i - p[0].item() for i, p in enumerate(params)]

    expected = {"value": [2.5, 2.5], "out of place": [0.75, 1.5]}.get(form, clipped([3.0, 6.0]))
    assert ranks(2, body) == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_the_old_recipe_for_clipping_still_works(ranks, size):
    def body(rank):
        params = parameters()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
        loss_of(params[:1], rank, 10.0).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(params, 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        torch.testing.assert_close(params[0].data, torch.full((3,), -(3**-0.5)))

    ranks(size, body)


# GradScaler


def train(rank, infinite_on, passes=1, clip=True, unscale=True, unused=False, make=None, **options):
    """Take four steps, the second with an infinite gradient on one rank; return weights and scales."""
    params = parameters()
    make = make or (lambda ps: torch.optim.SGD(ps, lr=1.0))
    optimizer = hvd.DistributedOptimizer(make(params), backward_passes_per_step=passes, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        for i in range(passes):
            broken = step == 1 and rank == infinite_on and i == passes - 1
            used = params[: 1 + rank] if unused else params
            scaler.scale(loss_of(used, rank, INFINITE if broken else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p[0].item() for p in params], scales


def after_three_steps(reduced):
    return [i - 3 * x for i, x in enumerate(reduced)]


@pytest.mark.parametrize("infinite_on", [0, 1, 2])
@pytest.mark.parametrize("passes", [1, 3])
@VIEWS
def test_the_usual_order_clips_the_average_and_skips_together(ranks, infinite_on, passes, views):
    expected = pytest.approx(after_three_steps(clipped([passes * 2.0, passes * 4.0])), rel=1e-5)
    results = ranks(3, lambda rank: train(rank, infinite_on, passes, **views))
    assert results == [(expected, [1024.0, 512.0, 512.0, 512.0])] * 3
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("infinite_on", [0, 1])
@pytest.mark.parametrize("unscale", [True, False])
@VIEWS
def test_a_short_last_group_is_reduced_before_the_scaler_looks(ranks, infinite_on, unscale, views):
    def body(rank):
        params = parameters()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), backward_passes_per_step=3, **views)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for made, broken in ((3, False), (2, True), (1, False), (3, False)):
            optimizer.zero_grad()
            for _ in range(made):
                factor = INFINITE if broken and rank == infinite_on else 1.0
                scaler.scale(loss_of(params, rank, factor)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [p[0].item() for p in params], scaler.get_scale()

    assert ranks(2, body) == [([-7 * 1.5, 1 - 7 * 3.0], 512.0)] * 2


@pytest.mark.parametrize("infinite_on", [0, 1])
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("views", [{}, {"groups": 1}, {"gradient_as_bucket_view": True}], ids=["own", "group", "views"])
def test_unused_parameters_are_reduced_before_the_scaler_looks(ranks, infinite_on, unscale, views):
    # Rank 0 uses the first parameter only; the average over both ranks of the second is (0 + 2 * 2) / 2.
    expected = pytest.approx(after_three_steps([1.5, 2.0]), rel=1e-5)
    results = ranks(2, lambda rank: train(rank, infinite_on, clip=False, unscale=unscale, unused=True, **views))
    assert results == [(expected, [1024.0, 512.0, 512.0, 512.0])] * 2


@pytest.mark.parametrize("infinite_on", [0, 1])
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_all_implementations_follow_the_scaler(ranks, infinite_on, unscale, kind):
    make = lambda ps: torch.optim.SGD(ps, lr=1.0, **kind)  # noqa: E731
    expected = pytest.approx(after_three_steps([1.5, 3.0]), rel=1e-5)
    results = ranks(2, lambda rank: train(rank, infinite_on, clip=False, unscale=unscale, make=make))
    assert results == [(expected, [1024.0, 512.0, 512.0, 512.0])] * 2


@pytest.mark.parametrize("infinite_on", [0, 1])
def test_a_scaler_may_serve_two_optimizers(ranks, infinite_on):
    def body(rank):
        first, second = parameters(2), parameters(1)
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0)) for ps in (first, second)]
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            broken = step == 1 and rank == infinite_on
            scaler.scale(loss_of(first, rank) + loss_of(second, rank, INFINITE if broken else 1.0)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return first[1][0].item(), second[0][0].item()

    assert ranks(2, body) == [(1 - 3 * 3.0, -2 * 1.5)] * 2  # only the second optimizer has skipped


def test_the_old_recipe_for_a_scaler_still_works(ranks):
    def body(rank):
        params = parameters(1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, INFINITE, 2.0):
            optimizer.zero_grad()
            scaler.scale(loss_of(params, rank, factor)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1000.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert params[0].tolist() == [-1.5 - 3.0] * 3

    ranks(2, body)


# Half types


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@VIEWS
def test_half_parameters_are_added_in_float32(ranks, size, dtype, views):
    def body(rank):
        weight = nn.Parameter(torch.zeros(5, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum, **views)
        # 256 + 1 is 256 in bfloat16 and 2048 + 1 is 2048 in float16: both ones would be lost one by one.
        large = 256.0 if dtype is torch.bfloat16 else 2048.0
        (weight * (large if rank == 0 else 1.0)).sum().backward()
        optimizer.step()
        assert weight.grad.dtype == weight.dtype == dtype
        expected = torch.tensor(large + size - 1).to(dtype)
        assert weight.tolist() == [-expected.item()] * 5

    ranks(size, body)


@VIEWS
def test_autocast_trains_alike(ranks, views):
    template = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def body(rank):
        model = copy.deepcopy(template)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), **views)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.full((2, 3), rank + 0.5)).square().mean()
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    first, second = ranks(2, body)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert not torch.equal(first, torch.cat([p.detach().reshape(-1) for p in template.parameters()]))
