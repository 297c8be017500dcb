"""Copies, pickles, checkpoints and schedulers of a distributed optimizer."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, betas=(0.5, 0.75)),
    "adamw": lambda ps: torch.optim.AdamW([{"params": list(ps), "lr": 0.2, "tag": "all"}], foreach=True),
    "fused adam": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
}
KINDS = pytest.mark.parametrize("kind", OPTIMIZERS)


class Counting(torch.optim.Optimizer):
    """Its state has an int, a float and a tensor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5, "pair": (0.5, 1)})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["rate"] = state["step"] / 2
                state["last"] = p.grad.clone()
                p.data.sub_(p.grad, alpha=group["lr"])


def make_model(factor=1.0):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    for i, p in enumerate(model.parameters()):
        p.data.copy_(factor * torch.cos(torch.arange(p.numel()) + i).view_as(p))
    return model


def train(model, optimizer, rank, steps=range(3)):
    for step in steps:
        optimizer.zero_grad()
        x = torch.sin(torch.arange(6, dtype=torch.float64) * (rank + 1) + step).view(2, 3)
        model(x).square().mean().backward()
        optimizer.step()
    return weights_of(model)


def weights_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def distributed(model, kind, **options):
    return hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), **options)


def same(first, second):
    """Compare nested values, types included."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and first == second


# Copies


@pytest.mark.parametrize("size", [1, 2, 3])
@KINDS
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_copy_trains_on_its_own_parameters(ranks, size, kind, options):
    def body(rank):
        model = make_model()
        optimizer = distributed(model, kind, **options)
        train(model, optimizer, rank)
        before = weights_of(model)
        twin, other = copy.deepcopy((model, optimizer))
        assert isinstance(other, type(OPTIMIZERS[kind](make_model().parameters())))
        assert (type(other).__name__, type(other).__module__) == (type(optimizer).__name__, "hvdlite.torch.optimizer")
        assert other.param_groups[0]["params"][0] is next(twin.parameters())
        after = train(twin, other, rank, range(3, 6))
        assert torch.equal(weights_of(model), before)
        assert torch.equal(train(model, optimizer, rank, range(3, 6)), after)
        # In turns: neither meets the other's gradients.
        for step in range(6, 9):
            train(twin, other, rank, [step])
            train(model, optimizer, rank, [step + 10])
        return weights_of(twin), weights_of(model)

    results = ranks(size, body)
    for twin, original in results:
        assert torch.equal(twin, results[0][0])
        assert torch.equal(original, results[0][1])
        assert not torch.equal(twin, original)


def test_a_copy_of_the_model_alone_is_not_reduced(ranks):
    def body(rank):
        model = make_model()
        optimizer = distributed(model, "sgd")
        twin = copy.deepcopy(model)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for one in (twin, averaged):
            one(torch.full((1, 3), rank + 1.0, dtype=torch.float64)).sum().backward()
        assert next(twin.parameters()).grad is not None
        averaged.update_parameters(model)
        mine = next(twin.parameters()).grad.sum().item()
        train(model, optimizer, rank)
        return mine, weights_of(model)

    (first, weights), (second, others) = ranks(2, body)
    assert first != second
    assert torch.equal(weights, others)


@KINDS
@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_a_pickle_gives_back_the_plain_optimizer_with_its_state(ranks, kind, way):
    def body(rank):
        model = make_model()
        optimizer = distributed(model, kind)
        train(model, optimizer, rank)
        if way == "pickle":
            twin, plain = pickle.loads(pickle.dumps((model, optimizer)))
        else:
            file = io.BytesIO()
            torch.save((model, optimizer), file)
            file.seek(0)
            twin, plain = torch.load(file, weights_only=False)
        assert type(plain) is type(OPTIMIZERS[kind](make_model().parameters()))
        assert not hasattr(plain, "synchronize")
        assert same(plain.state_dict(), optimizer.state_dict())
        bare_model = copy.deepcopy(model)
        bare = OPTIMIZERS[kind](bare_model.parameters())
        bare.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again_model, again = copy.deepcopy((twin, plain))
        alone = train(twin, plain, rank, range(3, 6))
        assert torch.equal(alone, train(bare_model, bare, rank, range(3, 6)))
        again = hvd.DistributedOptimizer(again, again_model.named_parameters())
        return alone, train(again_model, again, rank, range(3, 6)), train(model, optimizer, rank, range(3, 6))

    (first, *firsts), (second, *seconds) = ranks(2, body)
    assert not torch.equal(first, second)
    assert all(torch.equal(one, firsts[0]) for one in firsts + seconds)


# Checkpoints


@KINDS
def test_checkpoints_are_interchangeable_with_the_bare_optimizer(ranks, kind):
    def body(rank):
        bare_model, model = make_model(), make_model()
        bare, optimizer = OPTIMIZERS[kind](bare_model.parameters()), distributed(model, kind)
        for step in range(3):  # the bare one gets what all ranks have, so both are alike
            train(model, optimizer, rank, [step])
            bare.zero_grad()
            for p, q in zip(bare_model.parameters(), model.parameters(), strict=True):
                p.grad = q.grad.clone()
            bare.step()
        assert same(bare.state_dict(), optimizer.state_dict())
        fresh_model, fresh_bare_model = copy.deepcopy(model), copy.deepcopy(model)
        fresh, fresh_bare = distributed(fresh_model, kind), OPTIMIZERS[kind](fresh_bare_model.parameters())
        fresh.load_state_dict(copy.deepcopy(bare.state_dict()))
        fresh_bare.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert same(fresh.state_dict(), bare.state_dict())
        assert same(fresh_bare.state_dict(), optimizer.state_dict())
        expected = train(model, optimizer, rank, range(3, 6))
        assert torch.equal(train(fresh_model, fresh, rank, range(3, 6)), expected)

    ranks(2, body)


def test_loading_a_state_begins_a_new_step(ranks):
    def body(rank):
        params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), backward_passes_per_step=2)
        state = copy.deepcopy(optimizer.state_dict())
        (params[0] * 100).sum().backward()
        state["param_groups"][0]["lr"] = 0.25
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        for _ in range(2):
            sum((p * (rank + 1)).sum() for p in params).backward()
        optimizer.step()
        assert [p.tolist() for p in params] == [[-0.75, -0.75]] * 2

    ranks(2, body)


def test_hooks_on_the_state_are_kept(ranks):
    def body(rank):
        calls = []
        original = torch.optim.SGD(make_model().parameters(), lr=0.1)
        original.register_state_dict_post_hook(lambda *_: calls.append("save"))
        optimizer = hvd.DistributedOptimizer(original)
        optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls == ["save", "load"]

    ranks(2, body)


@pytest.mark.parametrize("root", [0, 1, 2])
@pytest.mark.parametrize("who", ["all", "only the root", "all but the root"])
def test_a_broadcast_of_the_state_neither_steps_nor_loses_types(ranks, root, who):
    def body(rank):
        model = make_model(rank + 1.0)
        optimizer = hvd.DistributedOptimizer(Counting(model.parameters()))
        steps = {"all": 2, "only the root": 2, "all but the root": 1}[who]
        if who == "all":
            train(model, optimizer, rank, range(steps))
        elif (rank == root) == (who == "only the root"):
            for p in model.parameters():
                p.grad = torch.full_like(p, rank + 1.0)
            for _ in range(steps):
                Counting.step(optimizer)
        optimizer.param_groups[0].update(lr=0.5 * (rank + 1), pair=(0.5, rank))
        before = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        for p, (data, gradient) in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, data)
            assert (p.grad is None) if gradient is None else torch.equal(p.grad, gradient)
        return optimizer.state_dict()

    states = ranks(3, body)
    assert same(states[0], states[1])
    assert same(states[0], states[2])
    group = states[0]["param_groups"][0]
    assert same((group["lr"], group["pair"]), (0.5 * (root + 1), (0.5, root)))
    steps = [entry["step"] for entry in states[0]["state"].values()]
    assert same(steps, [] if who == "all but the root" else [2] * 4)


# Schedulers

SCHEDULES = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=7),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(o, [SCHEDULES["step"](o), SCHEDULES["cosine"](o)], [2]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("of", ["original", "distributed"])
def test_a_scheduler_may_hold_either_optimizer(ranks, schedule, of):
    def rates(optimizer, scheduler, step):
        seen = []
        for i in range(5):
            step(optimizer)  # warnings are errors here: the scheduler must see the step
            scheduler.step(*[float(i)] * (schedule == "plateau"))
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    def step(optimizer):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()

    def body(rank):
        original = torch.optim.SGD(make_model().parameters(), lr=1.0, momentum=0.5)
        early = SCHEDULES[schedule](original) if of == "original" else None
        optimizer = hvd.DistributedOptimizer(original)
        assert isinstance(optimizer, torch.optim.SGD)
        scheduler = early or SCHEDULES[schedule](optimizer)
        bare = torch.optim.SGD(make_model().parameters(), lr=1.0, momentum=0.5)
        assert rates(optimizer, scheduler, step) == rates(bare, SCHEDULES[schedule](bare), step)
        other = SCHEDULES[schedule](torch.optim.SGD(make_model().parameters(), lr=1.0, momentum=0.5))
        other.load_state_dict(scheduler.state_dict())
        assert other.last_epoch == scheduler.last_epoch

    ranks(2, body)
