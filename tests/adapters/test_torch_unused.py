"""Parameters that took no part on some ranks, or are frozen for a while."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.trips import OrderError

OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
LAYOUTS = pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"gradient_as_bucket_view": True}], ids=["own", "groups", "views"]
)
FINISH = {
    "step": lambda optimizer: optimizer.step(),
    "synchronize": lambda optimizer: optimizer.synchronize(),
    "unscale": lambda optimizer: unscale(optimizer),
}


def unscale(optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))  # which is when it makes its scale
    scaler.unscale_(optimizer)


def parameters(n=3, length=2):
    return [nn.Parameter(torch.full((length,), float(i))) for i in range(n)]


def wrapped(params, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)


def backward(params, factor):
    sum((p * (i + 1) * factor).sum() for i, p in enumerate(params)).backward()


def gradients(params):
    return [None if p.grad is None else p.grad[0].item() for p in params]


# Unused


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
@LAYOUTS
@OPS
def test_parameters_without_a_part_count_as_zero(ranks, size, set_to_none, options, op):
    def body(rank):
        params = parameters(4)
        optimizer = wrapped(params, op=op, **options)
        n = 1 if op == hvd.Sum else size
        for unused in (2, 3, 1):
            optimizer.zero_grad(set_to_none=set_to_none)
            used = [p for i, p in enumerate(params) if i not in (rank, unused)]
            sum((p * (rank + 1)).sum() for p in used).backward()
            optimizer.step()
            everyone = sum(range(1, size + 1))
            expected = [0.0 if i == unused else (everyone - (i + 1) * (i < size)) / n for i in range(4)]
            assert gradients(params) == pytest.approx(expected)
        return [p.tolist() for p in params]

    weights = ranks(size, body)
    assert all(other == weights[0] for other in weights)


@pytest.mark.parametrize("finish", FINISH)
@LAYOUTS
@OPS
def test_what_is_left_is_reduced_at_the_first_occasion(ranks, finish, options, op):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, op=op, **options)
        backward(params[: 1 + rank], rank + 1)  # the third by nobody
        FINISH[finish](optimizer)
        assert gradients(params) == ([3.0, 4.0, 0.0] if op == hvd.Sum else [1.5, 2.0, 0.0])

    ranks(2, body)


@pytest.mark.parametrize("finish", FINISH)
def test_the_occasion_may_differ_between_ranks(ranks, finish):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params)
        backward(params[: 1 + rank], rank + 1)
        if rank == 1:
            FINISH[finish](optimizer)
        else:
            optimizer.synchronize()
        assert gradients(params) == [1.5, 2.0]

    ranks(2, body)


def test_a_rank_may_look_at_its_groups_while_others_go_on(ranks):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params)
        for _ in range(2):
            optimizer.zero_grad()
            backward(params[:1], rank + 1)
            if rank == 0:
                assert optimizer.param_groups[0]["lr"] == 1.0
            hvd.barrier()
            optimizer.step()
            assert gradients(params) == [1.5, 0.0]

    ranks(2, body)


@LAYOUTS
def test_ranks_may_talk_between_backward_and_step(ranks, options):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, **options)
        for _ in range(3):
            optimizer.zero_grad()
            backward(params if rank == 0 else params[:1], rank + 1)
            # Had rank 0 waited in backward() for gradients that rank 1 does not have, this would hang.
            assert hvd.allreduce(torch.tensor(float(rank)), name="loss") == 1.0
            optimizer.step()
            assert gradients(params) == [2.0, pytest.approx(2 / 3), 1.0]

    ranks(3, body)


@LAYOUTS
def test_a_rank_may_have_no_backward_pass_at_all(ranks, options):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params, **options)
        for lazy in (0, 1, 0):
            optimizer.zero_grad()
            if rank != lazy:
                backward(params, 4.0)
            optimizer.step()
            assert gradients(params) == [2.0, 4.0]

    ranks(2, body)


def test_gradients_put_in_by_hand_are_reduced(ranks):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params)
        for _ in range(2):
            optimizer.zero_grad()
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, (i + 1.0) * (rank + 1))
            optimizer.step()
            assert gradients(params) == [1.5, 3.0]

    ranks(2, body)


def test_layers_that_only_some_ranks_use_train_as_in_one_process(ranks):
    def loss_of(model, x, branch):
        return model["head"](model[branch](x)).square().mean()

    template = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("left", "right", "head")}).double()
    data = torch.randn(6, 2, 5, 4, dtype=torch.float64)
    branches = [("left", "right"), ("right", "right"), ("left", "left")] * 2

    def body(rank):
        model = copy.deepcopy(template)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        for x, branch in zip(data, branches, strict=True):
            optimizer.zero_grad()
            loss_of(model, x[rank], branch[rank]).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    alone = copy.deepcopy(template)
    optimizer = torch.optim.Adam(alone.parameters())
    for x, branch in zip(data, branches, strict=True):
        for p in alone.parameters():
            p.grad = torch.zeros_like(p)
        (sum(loss_of(alone, x[rank], branch[rank]) for rank in range(2)) / 2).backward()
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in alone.parameters()])
    first, second = ranks(2, body)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-9, atol=1e-9)


@LAYOUTS
def test_clipping_too_early_is_refused_and_the_next_step_works(ranks, options):
    def body(rank):
        params = parameters(3)
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        optimizer = wrapped(params, named_parameters=named, **options)
        backward(params[:2], 10.0 * (rank + 1))  # the third is unused, so nothing is final yet
        nn.utils.clip_grad_norm_(params, 1.0)
        with pytest.raises(OrderError, match=r"p[01].*(?s:.*)synchronize\(\)"):
            optimizer.step()
        hvd.barrier()
        optimizer.zero_grad()
        backward(params, rank + 1)
        optimizer.step()
        assert gradients(params) == [1.5, 3.0, 4.5]

    ranks(2, body)


def test_clipping_too_early_on_one_rank_leaves_no_rank_waiting(ranks):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params)
        backward(params[:2], 10.0 * (rank + 1))
        if rank == 1:
            nn.utils.clip_grad_norm_(params, 1.0)
            with pytest.raises(OrderError, match=r"synchronize\(\)"):
                optimizer.step()
        else:
            try:
                optimizer.step()
            except hvd.HvdliteError as error:
                assert "rank 1" in str(error)
        hvd.barrier()
        optimizer.zero_grad()
        backward(params, rank + 1)
        optimizer.step()
        assert gradients(params) == [1.5, 3.0, 4.5]

    ranks(2, body)


@LAYOUTS
def test_clipping_after_synchronize_is_right_with_unused_parameters(ranks, options):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, **options)
        backward(params[:1], 10.0 * (rank + 1))
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(params, 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert gradients(params) == [pytest.approx(0.5**0.5, rel=1e-5), 0.0, 0.0]

    ranks(2, body)


# Frozen


def test_frozen_parameters_are_left_alone(ranks):
    def body(rank):
        params = parameters(3)
        params[1].requires_grad_(False)
        optimizer = wrapped(params, groups=2)
        backward(params, rank + 1)
        assert gradients(params) == [1.5, None, 4.5]  # nobody waits for it
        optimizer.step()
        assert gradients(params) == [1.5, None, 4.5]

    ranks(2, body)


@LAYOUTS
def test_parameters_may_be_frozen_and_unfrozen(ranks, options):
    def body(rank):
        params = parameters(2)
        params[1].requires_grad_(False)
        optimizer = wrapped(params, **options)
        for frozen in (1, 0, 1, 0):
            optimizer.zero_grad()
            params[frozen].requires_grad_(False)
            params[1 - frozen].requires_grad_(True)
            backward(params, rank + 1)
            optimizer.step()
            assert gradients(params)[frozen] is None
            assert gradients(params)[1 - frozen] == 1.5 * (2 - frozen)

    ranks(2, body)


@pytest.mark.parametrize("since", ["before wrapping", "later"])
@LAYOUTS
@OPS
def test_a_parameter_frozen_on_one_rank_took_no_part_there(ranks, since, options, op):
    def body(rank):
        params = parameters(2)
        if since == "before wrapping":
            params[1].requires_grad_(rank != 1)
        optimizer = wrapped(params, op=op, **options)
        for _ in range(3):
            params[1].requires_grad_(rank != 1)
            optimizer.zero_grad()
            backward(params, rank + 1)
            optimizer.step()
            assert gradients(params) == ([3.0, 2.0] if op == hvd.Sum else [1.5, 1.0])
        return [p.tolist() for p in params]

    first, second = ranks(2, body)
    assert first == second


def test_all_parameters_may_be_frozen(ranks):
    def body(rank):
        params = parameters(2)
        for p in params:
            p.requires_grad_(False)
        optimizer = wrapped(params)
        optimizer.step()
        assert [p.tolist() for p in params] == [[0.0, 0.0], [1.0, 1.0]]
        params[1].requires_grad_(True)
        (params[1] * (rank + 1)).sum().backward()
        optimizer.step()
        assert [p.tolist() for p in params] == [[0.0, 0.0], [-0.5, -0.5]]

    ranks(2, body)
