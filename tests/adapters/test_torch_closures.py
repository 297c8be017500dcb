"""step(closure): each evaluation is reduced, and its loss is averaged, so that all ranks take the same decisions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

OPTIMIZERS = {
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.5, max_iter=5, history_size=3),
    "strong wolfe": lambda ps: torch.optim.LBFGS(ps, max_iter=6, line_search_fn="strong_wolfe"),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
}


def make_model():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for i, p in enumerate(model.parameters()):
        p.data.copy_(torch.sin(torch.arange(p.numel()) + i).view_as(p))
    return model


def train(model, optimizer, x, passes=1, owner=None):
    """Take three steps; return the weights, all losses that step() gave, and how often the closure ran."""
    calls = []

    def closure():
        calls.append(None)
        (owner or optimizer).zero_grad()
        losses = [((model(part) - part[:, :2].exp()) ** 2).mean() / passes for part in x.chunk(passes)]
        for loss in losses:
            loss.backward()
        return sum(losses).detach() if passes > 1 else losses[0]

    losses = [torch.as_tensor(optimizer.step(closure)).item() for _ in range(3)]
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), losses, len(calls)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"gradient_as_bucket_view": True}, {"backward_passes_per_step": 2}], ids=str
)
def test_it_is_the_optimizer_of_the_concatenated_batch(ranks, size, kind, options):
    x = torch.sin(torch.arange(size * 12, dtype=torch.float64) ** 2).view(size * 4, 3)
    alone = make_model()
    expected, expected_losses, expected_calls = train(alone, OPTIMIZERS[kind](alone.parameters()), x)

    def body(rank):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), **options)
        return train(model, optimizer, x[rank * 4 : rank * 4 + 4], options.get("backward_passes_per_step", 1))

    results = ranks(size, body)
    assert all(torch.equal(weights, results[0][0]) for weights, _, _ in results)
    for weights, losses, calls in results:
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        assert losses == results[0][1]
        assert calls == expected_calls


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_model_may_clear_the_gradients(ranks, kind):
    x = torch.sin(torch.arange(24, dtype=torch.float64)).view(8, 3)

    def body(rank):
        results = []
        for by_model in (False, True):
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))
            results.append(train(model, optimizer, x[rank::2], owner=model if by_model else None))
        (first, _, _), (second, _, _) = results
        assert torch.equal(first, second)

    ranks(2, body)


def test_parameters_unused_in_a_closure_are_reduced_as_well(ranks):
    def body(rank):
        params = [nn.Parameter(torch.full((2,), 4.0, dtype=torch.float64)) for _ in range(3)]
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(params, max_iter=8))

        def closure():
            optimizer.zero_grad()
            loss = ((params[rank] - 1) ** 2).sum() + ((params[2] - 1 - 2 * rank) ** 2).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return [p.tolist() for p in params]

    first, second = ranks(2, body)
    assert first == second
    assert [values[0] for values in first] == pytest.approx([1.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("give", "expected"),
    [
        (lambda rank: 2.0 * rank, 1.0),
        (lambda rank: torch.tensor(2.0 * rank), 1.0),
        (lambda rank: torch.tensor([2.0 * rank]), 1.0),
        (lambda rank: 2 * rank + 1, 2),
        (lambda rank: None, None),
    ],
    ids=["float", "tensor", "one element", "int", "None"],
)
def test_the_loss_is_averaged_whatever_it_is(ranks, give, expected):
    def body(rank):
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))

        def closure():
            optimizer.zero_grad()
            (weight * (rank + 1)).sum().backward()
            return give(rank)

        loss = optimizer.step(closure)
        assert weight.tolist() == [-0.5, -0.5]
        return None if loss is None else float(loss)

    assert ranks(2, body) == [expected] * 2


def test_losses_stay_within_their_process_set(ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 2])
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=pair)

        def closure():
            optimizer.zero_grad()
            loss = (weight * (rank + 1)).sum()
            loss.backward()
            return loss

        return torch.as_tensor(optimizer.step(closure)).item(), weight.tolist()

    assert ranks(3, body) == [(4.0, [-1.0, -1.0]), (4.0, [-1.0, -1.0]), (4.0, [-1.0, -1.0])]


def test_a_closure_that_raises_ends_nothing_but_this_step(ranks):
    def body(rank):
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))

        def closure():
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
        optimizer.zero_grad()
        (weight * (rank + 1)).sum().backward()
        optimizer.step()
        assert weight.tolist() == [-0.5, -0.5]

    ranks(2, body)


def test_step_without_closure_may_follow(ranks):
    def body(rank):
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)

        def closure():
            optimizer.zero_grad()
            loss = (weight * (rank + 1)).sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
            optimizer.zero_grad()
            (weight * (rank + 1)).sum().backward()
            optimizer.step()
        assert weight.tolist() == [1 - 4 * 3.0] * 2

    ranks(2, body)


def test_a_copy_takes_closures_too(ranks):
    x = torch.sin(torch.arange(24, dtype=torch.float64)).view(8, 3)

    def body(rank):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()))
        twin, other = copy.deepcopy((model, optimizer))
        first, _, _ = train(twin, other, x[rank::2])
        second, _, _ = train(model, optimizer, x[rank::2])
        assert torch.equal(first, second)

    ranks(2, body)
