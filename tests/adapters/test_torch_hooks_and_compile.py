"""Next to torch's own means: the user's hooks, checkpointing, torch.compile."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvdlite.torch as hvd
from hvdlite.torch.trips import OrderError

OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"gradient_as_bucket_view": True}], ids=["own", "groups", "views"]
)
OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])


def parameters(n=2, length=2):
    return [nn.Parameter(torch.full((length,), float(i))) for i in range(n)]


def wrapped(params, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)


def backward(params, factor):
    sum((p * (i + 1) * factor).sum() for i, p in enumerate(params)).backward()


def gradients(params):
    return [None if p.grad is None else p.grad[0].item() for p in params]


def make_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    for i, p in enumerate(model.parameters()):
        p.data.copy_(torch.cos(torch.arange(p.numel()) * (i + 1)).view_as(p) / 2)
    return model


def batch_of(rank, step=0):
    return torch.sin(torch.arange(6, dtype=torch.float64) * (rank + 1) + step).view(2, 3)


def summed_gradients(size, forward=None):
    """What the ranks' gradients of the first batch add up to, without any other means."""
    model = make_model()
    for rank in range(size):
        (forward or model.__class__.__call__)(model, batch_of(rank)).square().mean().backward()
    return [p.grad for p in model.parameters()]


# Hooks


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
@OPTIONS
@OPS
def test_tensor_hooks_see_and_change_the_local_gradient(ranks, when, options, op):
    def body(rank):
        params, seen = parameters(), []

        def hook(gradient):
            seen.append(gradient[0].item())
            return gradient * 10

        if when == "before wrapping":
            params[1].register_hook(hook)
        optimizer = wrapped(params, op=op, **options)
        if when == "after wrapping":
            params[1].register_hook(hook)
        for _ in range(2):
            optimizer.zero_grad()
            backward(params, rank + 1)
            optimizer.step()
            assert gradients(params) == ([3.0, 60.0] if op == hvd.Sum else [1.5, 30.0])
        assert seen == [2.0 * (rank + 1)] * 2

    ranks(2, body)


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
@OPTIONS
def test_hooks_after_accumulation_run_once_in_each_pass(ranks, when, options):
    def body(rank):
        params, calls = parameters(), []
        hook = lambda p: calls.append(tuple(p.shape))  # noqa: E731
        if when == "before wrapping":
            params[0].register_post_accumulate_grad_hook(hook)
        optimizer = wrapped(params, op=hvd.Sum, backward_passes_per_step=2, **options)
        if when == "after wrapping":
            params[0].register_post_accumulate_grad_hook(hook)
        for _ in range(2):
            optimizer.zero_grad()
            backward(params, rank + 1)
            backward(params, rank + 1)
            optimizer.step()
            assert gradients(params) == [6.0, 12.0]
        assert calls == [(2,)] * 4

    ranks(2, body)


def test_hooks_of_modules_run(ranks):
    def body(rank):
        model, calls = make_model(), []
        model[2].register_full_backward_hook(lambda *_: calls.append("backward"))
        model[2].register_forward_hook(lambda *_: calls.append("forward"))
        optimizer = wrapped(model.parameters(), op=hvd.Sum)
        model(batch_of(rank)).square().mean().backward()
        optimizer.step()
        assert calls == ["forward", "backward"]
        return [p.grad for p in model.parameters()]

    for found in ranks(2, body):
        torch.testing.assert_close(found, summed_gradients(2))


@pytest.mark.parametrize("unused", [False, True])
def test_hooks_of_a_step_see_reduced_gradients_once(ranks, unused):
    def body(rank):
        params, seen = parameters(), []
        original = torch.optim.SGD(params, lr=1.0)
        original.register_step_pre_hook(lambda *_: seen.append(("pre", *gradients(params))))
        optimizer = hvd.DistributedOptimizer(original)
        optimizer.register_step_post_hook(lambda *_: seen.append(("post", *gradients(params))))
        backward(params[: 1 + rank] if unused else params, rank + 1)
        optimizer.step()
        reduced = (1.5, 2.0) if unused else (1.5, 3.0)
        assert seen == [("pre", *reduced), ("post", *reduced)]

    ranks(2, body)


def test_autograd_grad_and_retained_graphs_reduce_nothing_by_themselves(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, op=hvd.Sum)
        loss = sum((p * (i + 1) * (rank + 1)).sum() for i, p in enumerate(params))
        if rank == 0:  # nobody is waited for
            (given,) = torch.autograd.grad(loss, params[:1], retain_graph=True)
            assert given.tolist() == [1.0, 1.0]
        loss.backward(retain_graph=True)
        optimizer.step()
        assert gradients(params) == [3.0, 6.0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert gradients(params) == [3.0, 6.0]

    ranks(2, body)


@OPTIONS
def test_backward_of_some_inputs_leaves_the_others_to_step(ranks, options):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, op=hvd.Sum, **options)
        loss = sum((p * (i + 1) * (rank + 1)).sum() for i, p in enumerate(params))
        loss.backward(inputs=params[1:])
        optimizer.step()
        assert gradients(params) == [0.0, 6.0]

    ranks(2, body)


def test_a_gradient_penalty_is_reduced_once(ranks):
    def body(rank):
        weight = nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
        optimizer = wrapped([weight], op=hvd.Sum)
        x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad((weight * x**2).sum(), x, create_graph=True)
        slope.square().sum().backward()  # (2 w x)^2, so that the gradient is 8 w x^2
        optimizer.step()
        assert weight.grad.tolist() == [8 * 2.0 * 5, 8 * 3.0 * 5]

    ranks(2, body)


@OPTIONS
def test_a_pass_with_create_graph_is_reduced(ranks, options):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, **options)
        loss = sum((p**2 * (rank + 1)).sum() for p in params)
        gradients_with_graph = torch.autograd.grad(loss, params, create_graph=True)
        (loss + sum(g.sum() for g in gradients_with_graph)).backward()
        optimizer.step()
        assert gradients(params) == [1.5 * (2 * i + 2) for i in range(2)]

    ranks(2, body)


# Checkpointing


def checkpointed(reentrant, times=1):
    def forward(model, x):
        x = x.clone().requires_grad_()  # the reentrant kind wants an input with a gradient
        for part in (model[:2], *[model[2:4]] * times):
            x = checkpoint(part, x, use_reentrant=reentrant)
        return model[4](x)

    return forward


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@OPTIONS
def test_checkpointed_layers_are_reduced_once(ranks, size, reentrant, passes, options):
    forward = checkpointed(reentrant)

    def body(rank):
        model = make_model()
        optimizer = wrapped(model.parameters(), op=hvd.Sum, backward_passes_per_step=passes, **options)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(passes):
                (forward(model, batch_of(rank)).square().mean() / passes).backward()
            found = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        return found

    for found in ranks(size, body):
        torch.testing.assert_close(found, summed_gradients(size))


@OPTIONS
def test_layers_before_and_after_a_reentrant_checkpoint_are_reduced_once(ranks, options):
    def forward(model, x):
        return model[4](checkpoint(model[2:4], model[:2](x), use_reentrant=True))

    def body(rank):
        model = make_model()
        optimizer = wrapped(model.parameters(), op=hvd.Sum, **options)
        for _ in range(2):
            optimizer.zero_grad()
            forward(model, batch_of(rank)).square().mean().backward()
            found = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        return found

    for found in ranks(2, body):
        torch.testing.assert_close(found, summed_gradients(2))


@OPS
def test_a_checkpointed_layer_used_twice_is_reduced_once(ranks, op):
    forward = checkpointed(reentrant=False, times=2)

    def body(rank):
        model = make_model()
        optimizer = wrapped(model.parameters(), op=op)
        for _ in range(2):
            optimizer.zero_grad()
            forward(model, batch_of(rank)).square().mean().backward()
            found = [p.grad.clone() * (1 if op == hvd.Sum else 2) for p in model.parameters()]
        optimizer.step()
        return found

    for found in ranks(2, body):
        torch.testing.assert_close(found, summed_gradients(2, forward))


@OPS
def test_a_layer_in_two_reentrant_checkpoints_needs_no_sync(ranks, op):
    # Each of them is a backward pass within the backward pass, and a gradient of its own.
    forward = checkpointed(reentrant=True, times=2)

    def body(rank):
        model = make_model()
        optimizer = wrapped(model.parameters(), op=op)
        with pytest.raises(OrderError, match=r"no_sync\(\)"):
            forward(model, batch_of(rank)).square().mean().backward()
            optimizer.step()
        hvd.barrier()
        optimizer.zero_grad()
        with optimizer.no_sync():
            forward(model, batch_of(rank)).square().mean().backward()
        optimizer.step()
        return [p.grad * (1 if op == hvd.Sum else 2) for p in model.parameters()]

    for found in ranks(2, body):
        torch.testing.assert_close(found, summed_gradients(2, forward))


# torch.compile


@pytest.mark.parametrize("order", ["before wrapping", "after wrapping", "in place"])
@OPTIONS
def test_compiled_models_are_reduced_once(ranks, order, options):
    compiling = threading.Lock()  # the compiler is not made for several threads at a time
    torch.compiler.reset()

    def body(rank):
        model = run = make_model()
        if order == "before wrapping":
            run = torch.compile(model, backend="aot_eager")
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(run.parameters(), lr=1.0), run.named_parameters(), op=hvd.Sum, **options
        )
        if order == "after wrapping":
            run = torch.compile(model, backend="aot_eager")
        elif order == "in place":
            model.compile(backend="aot_eager")
        for _ in range(2):
            optimizer.zero_grad()
            with compiling:
                loss = run(batch_of(rank)).square().mean()
            loss.backward()
            found = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        return found

    for found in ranks(2, body, timeout=60.0):
        torch.testing.assert_close(found, summed_gradients(2))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_compiled_model_trains_like_the_plain_one(ranks, passes):
    compiling = threading.Lock()
    torch.compiler.reset()

    def body(rank):
        weights = []
        for compiled in (False, True):
            model = run = make_model()
            if compiled:
                run = torch.compile(model, backend="aot_eager")
            optimizer = hvd.DistributedOptimizer(
                torch.optim.Adam(run.parameters()), run.named_parameters(), backward_passes_per_step=passes
            )
            for step in range(3):
                optimizer.zero_grad()
                for i in range(passes):
                    with compiling:
                        loss = run(batch_of(rank, 10 * step + i)).square().mean()
                    loss.backward()
                optimizer.step()
            weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        torch.testing.assert_close(weights[1], weights[0], rtol=1e-9, atol=1e-9)
        return weights[1]

    first, second = ranks(2, body, timeout=60.0)
    assert torch.equal(first, second)


def test_models_that_were_copied_while_hooked_compile(ranks):
    compiling = threading.Lock()
    torch.compiler.reset()

    def body(rank):
        model = make_model()
        optimizer = wrapped(model.parameters())
        twin, other = copy.deepcopy((model, optimizer))
        run = torch.compile(twin, backend="aot_eager")
        with compiling:
            loss = run(batch_of(rank)).square().mean()
        loss.backward()
        other.step()
        return [p.grad * 2 for p in twin.parameters()]

    for found in ranks(2, body, timeout=60.0):
        torch.testing.assert_close(found, summed_gradients(2))
