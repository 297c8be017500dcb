"""DistributedOptimizer: what it is, when it reduces, and what it refuses."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd


def parameters(n=3, length=2):
    return [nn.Parameter(torch.full((length,), float(i))) for i in range(n)]


def wrapped(params, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)


def backward(params, rank, factor=1.0):
    """Give parameter i the gradient factor * (i + 1) * (rank + 1)."""
    sum((p * (i + 1) * (rank + 1) * factor).sum() for i, p in enumerate(params)).backward()


def gradients(params):
    return [None if p.grad is None else p.grad[0].item() for p in params]


# What it is


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_an_instance_of_the_wrapped_class(ranks, size):
    def body(rank):
        original = torch.optim.Adam(parameters(), lr=0.5, betas=(0.5, 0.7))
        optimizer = hvd.DistributedOptimizer(original)
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        assert type(optimizer).__module__ == "hvdlite.torch.optimizer"
        assert optimizer.param_groups is original.param_groups
        assert optimizer.defaults["betas"] == (0.5, 0.7)
        assert optimizer.state_dict()["param_groups"] == original.state_dict()["param_groups"]

    ranks(size, body)


def test_state_is_carried_over(ranks):
    def body(rank):
        params = parameters()
        original = torch.optim.Adam(params)
        backward(params, 0)
        original.step()
        optimizer = hvd.DistributedOptimizer(original)
        assert optimizer.state[params[0]]["step"] == 1
        optimizer.zero_grad()
        backward(params, rank)
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == 2

    ranks(2, body)


def test_classes_with_other_constructors_are_wrapped(ranks):
    class Picky(torch.optim.SGD):
        def __init__(self, needed, *, params):
            super().__init__(params, lr=needed)
            self.needed = needed

    def body(rank):
        params = parameters()
        optimizer = hvd.DistributedOptimizer(Picky(0.5, params=params))
        backward(params, rank)
        optimizer.step()
        assert optimizer.needed == 0.5
        assert params[1].tolist() == [1 - 0.5 * 2 * 1.5] * 2

    ranks(2, body)


def test_one_rank_has_no_hooks(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, named_parameters=[(f"p{i}", p) for i, p in enumerate(params)])
        backward(params, rank)
        optimizer.zero_grad()  # nothing is in flight
        backward(params, rank)
        backward(params, rank)
        optimizer.step()
        assert params[0].tolist() == [-2.0, -2.0]
        assert optimizer.seconds_waited == 0.0
        assert not params[0]._post_accumulate_grad_hooks

    ranks(1, body)


# What it computes


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("groups", [None, 1, 2, 100, "lists"])
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1.0),
        ({"op": hvd.Average, "gradient_predivide_factor": 4.0}, 1.0),
        ({"op": hvd.Sum}, "size"),
        ({"compression": hvd.Compression.fp16}, 1.0),
        ({"compression": hvd.Compression.bf16, "op": hvd.Sum}, "size"),
    ],
)
@pytest.mark.parametrize("batch", [0, 12, 2**20])  # bytes; a gradient has 8
def test_gradients_are_those_of_all_ranks(ranks, monkeypatch, batch, size, groups, options, factor):
    monkeypatch.setattr("hvdlite.torch.fleet.BATCH_BYTES", batch)

    def body(rank):
        params = parameters(5)
        chosen = [[params[3], params[0]], [params[1]]] if groups == "lists" else groups
        optimizer = wrapped(params, groups=chosen, **options)
        backward(params, rank)
        optimizer.synchronize()
        mean = (size + 1) / 2 * (size if factor == "size" else 1)
        assert gradients(params) == [(i + 1) * mean for i in range(5)]
        assert optimizer.seconds_waited > 0.0

    ranks(size, body)


def test_parameters_added_later_are_reduced(ranks):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params[:1], named_parameters=[("first", params[0])])
        optimizer.add_param_group({"params": params[1:], "lr": 0.5})
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [1.5, 3.0, 4.5]
        assert [p[0].item() for p in params] == [-1.5, 1 - 1.5, 2 - 2.25]

    ranks(2, body)


def test_ranks_outside_the_set_keep_their_gradients(ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 2])
        params = parameters(2)
        optimizer = wrapped(params, process_set=pair)
        backward(params, rank**2)
        optimizer.step()
        assert gradients(params) == ([2.0, 4.0] if rank == 1 else [3.0, 6.0])

    ranks(3, body)


def test_large_gradients_travel_while_backward_runs(ranks, monkeypatch):
    monkeypatch.setattr("hvdlite.torch.reducer.has_spare_cores", lambda: True)

    def body(rank):
        early, late = parameters(2, length=300_001)
        optimizer = wrapped([early, late])
        deadline = time.monotonic() + 20

        def wait(_):
            while late.grad[-1].item() != 1.5 and time.monotonic() < deadline:
                pass
            assert late.grad[-1].item() == 1.5

        hidden = early.clone()
        hidden.register_hook(wait)  # runs after the gradient of `late` is there
        ((hidden + late) * (rank + 1)).sum().backward()
        optimizer.step()
        assert gradients([early, late]) == [1.5, 1.5]

    ranks(2, body)


# What it refuses


def cases():
    p, q = parameters(2)
    sgd = lambda: torch.optim.SGD([p, q], lr=1.0)  # noqa: E731
    return {
        "expected a torch.optim.Optimizer, got int": lambda: hvd.DistributedOptimizer(3),
        "distributed already": lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd())),
        r"backward_passes_per_step=0": lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0),
        "needs op=Average": lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0),
        "op=Min: expected Average, Sum or Adasum": lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Min),
        r"groups=0: expected a positive number": lambda: hvd.DistributedOptimizer(sgd(), groups=0),
        r"groups='x'.*list of lists": lambda: hvd.DistributedOptimizer(sgd(), groups="x"),
        r"groups=\[tensor": lambda: hvd.DistributedOptimizer(sgd(), groups=[torch.ones(1)]),
        "some members are not tensors": lambda: hvd.DistributedOptimizer(sgd(), groups=[[1]]),
        "in more than one place": lambda: hvd.DistributedOptimizer(sgd(), groups=[[p, q], [p]]),
        "more than once: a": lambda: hvd.DistributedOptimizer(sgd(), named_parameters=[("a", p), ("a", q)]),
        r"parameter 1 of group 0": lambda: hvd.DistributedOptimizer(sgd(), named_parameters=[("a", p)]),
        r"expected \(name, parameter\) pairs": lambda: hvd.DistributedOptimizer(sgd(), named_parameters=[p, q]),
        r"expected \(name, parameter\) pairs; see": lambda: hvd.DistributedOptimizer(sgd(), named_parameters=5),
    }


@pytest.mark.parametrize("message", list(cases()))
def test_wrong_arguments_are_refused(ranks, message):
    def body(rank):
        with pytest.raises(ValueError, match=message):
            cases()[message]()

    ranks(1, body)


def test_num_groups_is_the_old_name_of_groups(ranks):
    def body(rank):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped(parameters(), num_groups=2)
        assert [str(one.message) for one in caught] == ["num_groups is deprecated; use groups."]

    ranks(1, body)


def test_it_needs_init():
    with pytest.raises(hvd.NotInitializedError):
        wrapped(parameters())
