"""broadcast_parameters and broadcast_optimizer_state, from every root."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

ROOTS = [0, 1, 2]


def model_of(rank):
    """Return a model with floats, integers, bools and an empty buffer that differ between ranks."""
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Linear(3, 2, dtype=torch.bfloat16))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel()).reshape(p.shape) + 10 * i + 100 * rank)
    model.register_buffer("mask", torch.tensor([rank == 0, rank == 1, True]))
    model.register_buffer("nothing", torch.empty(0, 2))
    model[1].num_batches_tracked.fill_(rank + 5)
    return model


FORMS = {
    "state_dict": lambda model: model.state_dict(),
    "named_parameters": lambda model: model.named_parameters(),
    "pairs": lambda model: list(model.state_dict().items()),
    "parameters": lambda model: model.parameters(),
    "list": lambda model: list(model.parameters()),
}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_becomes_that_of_the_root(ranks, root, form):
    def body(rank):
        model = model_of(rank)
        kept = list(model.parameters())
        hvd.broadcast_parameters(FORMS[form](model), root_rank=root)
        expected = model_of(root)
        for p, q, k in zip(model.parameters(), expected.parameters(), kept, strict=True):
            assert p is k
            assert torch.equal(p, q)
            assert p.requires_grad
        if form in ("state_dict", "pairs"):
            for p, q in zip(model.buffers(), expected.buffers(), strict=True):
                assert torch.equal(p, q)

    ranks(3, body)


def test_what_is_no_tensor_stays_and_is_reported(ranks):
    said = []

    class Listener(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    def body(rank):
        given = {"a": torch.tensor([rank]), "extra": {"rank": rank}, "none": None}
        hvd.broadcast_parameters(given, root_rank=1)
        assert given == {"a": torch.tensor([1]), "extra": {"rank": rank}, "none": None}

    logger, listener = logging.getLogger("hvdlite"), Listener()
    logger.addHandler(listener)
    ranks(2, body)
    logger.removeHandler(listener)
    assert [text for text in said if "'extra' is a dict, not a tensor" in text] == said
    assert len(said) == 2


@pytest.mark.parametrize("given", [3, torch.zeros(2), [1, 2], [("a", 1, 2)], None])
def test_other_things_are_refused(ranks, given):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError, match="broadcast_parameters"):
            hvd.broadcast_parameters(given, root_rank=0)

    ranks(1, body)


def test_a_model_is_refused_with_the_remedy_on_all_ranks(ranks):
    def body(rank):
        model = nn.Sequential(nn.Linear(2, 1))
        with pytest.raises((hvd.InvalidRequestError, hvd.RemoteError), match=r"pass model.state_dict\(\)"):
            hvd.broadcast_parameters(model if rank == 1 else model.state_dict())
        value = torch.tensor([rank + 1])
        hvd.broadcast_parameters([value])  # from rank 0
        return value.item()

    assert ranks(3, body) == [1, 1, 1]


def test_before_init_they_name_themselves():
    with pytest.raises(hvd.NotInitializedError, match="broadcast_parameters: hvdlite has not been initialized"):
        hvd.broadcast_parameters({"a": torch.zeros(1)})
    with pytest.raises(hvd.NotInitializedError, match="broadcast_optimizer_state: hvdlite has not been initialized"):
        hvd.broadcast_optimizer_state(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_a_rank_that_makes_another_call_is_told_by_which_names(ranks):
    def body(rank):
        name = "broadcast_parameters.names"
        with pytest.raises(hvd.MismatchError, match=rf"'{name}'"):
            if rank == 0:
                hvd.broadcast_parameters({"a": torch.zeros(1)})
            else:
                hvd.allreduce(torch.zeros(1), name=name)
        hvd.barrier()

    ranks(2, body)


def test_different_names_raise_on_all_ranks(ranks):
    def body(rank):
        names = ["a", "b"] if rank == 0 else ["a", "c"]
        with pytest.raises(hvd.MismatchError, match=r"names of parameters.*\['[bc]'\].*on rank"):
            hvd.broadcast_parameters({name: torch.zeros(2) for name in names}, root_rank=0)
        hvd.barrier()

    ranks(3, body)


def test_different_shapes_raise_on_all_ranks(ranks):
    def body(rank):
        with pytest.raises(hvd.MismatchError, match="shape"):
            hvd.broadcast_parameters({"a": torch.zeros(2 + rank), "b": torch.full((3,), rank)}, root_rank=0)
        hvd.barrier()

    ranks(2, body)


def test_a_tensor_that_cannot_travel_raises_on_all_ranks(ranks):
    def body(rank):
        odd = torch.zeros(2).to_sparse() if rank == 1 else torch.zeros(2)
        b = torch.tensor([rank])
        with pytest.raises((hvd.InvalidRequestError, hvd.RemoteError), match="sparse"):
            hvd.broadcast_parameters({"a": odd, "b": b}, root_rank=0)
        assert b.tolist() == [0]

    ranks(2, body)


# Optimizers

MAKERS = {
    "sgd": lambda ps, r: torch.optim.SGD(ps, lr=0.1 * (r + 1), momentum=0.5 + r / 10),
    "plain sgd": lambda ps, r: torch.optim.SGD(ps, lr=0.1 * (r + 1)),
    "adam": lambda ps, r: torch.optim.Adam(ps, lr=0.1 * (r + 1), betas=(0.5 + r / 10, 0.9), amsgrad=True),
    "capturable": lambda ps, r: torch.optim.Adam(ps, lr=torch.tensor(0.1 * (r + 1)), foreach=False),
    "adagrad": lambda ps, r: torch.optim.Adagrad(ps, lr=0.1 * (r + 1)),
    "lbfgs": lambda ps, r: torch.optim.LBFGS(ps, lr=0.1 * (r + 1), max_iter=2),
}


def params_of(rank):
    return [nn.Parameter(torch.arange(n, dtype=torch.float64) + rank) for n in (3, 1)]


def trained(kind, rank, steps):
    params = params_of(rank)
    optimizer = MAKERS[kind](params, rank)

    def closure():
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params) * (rank + 1)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return params, optimizer


def typed(value):
    """Return a value in a form that compares types as well."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: typed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [typed(one) for one in value]
    return type(value), value


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("who", ["all", "only the root", "all but the root"])
def test_the_state_becomes_that_of_the_root(ranks, root, kind, who):
    def body(rank):
        steps = {"all": rank + 1, "only the root": 2 * (rank == root), "all but the root": rank != root}[who]
        params, optimizer = trained(kind, rank, steps)
        before = [p.tolist() for p in params], [typed(p.grad) for p in params]
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        assert before == ([p.tolist() for p in params], [typed(p.grad) for p in params])
        return typed(optimizer.state_dict())

    states = ranks(3, body)
    assert states[0] == states[1] == states[2]
    _, expected = trained(kind, root, {"all": root + 1, "only the root": 2, "all but the root": 0}[who])
    assert states[0] == typed(expected.state_dict())


def test_a_wrapped_optimizer_may_be_given(ranks):
    def body(rank):
        params, optimizer = trained("adam", rank, 2)
        distributed = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_optimizer_state(distributed, root_rank=1)
        assert distributed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.2
        assert distributed.state[params[0]] is optimizer.state[params[0]]

    ranks(2, body)


def test_optimizers_that_differ_raise_on_all_ranks(ranks):
    def body(rank):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1)) for _ in range(2 + rank)], lr=0.1)
        with pytest.raises(hvd.MismatchError, match="number of parameters in each group"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        hvd.barrier()

    ranks(2, body)


def test_a_learning_rate_tensor_stays_the_same_object(ranks):
    def body(rank):
        lr = torch.tensor(0.5 + rank)
        optimizer = torch.optim.Adam(params_of(rank), lr=lr, foreach=False)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert optimizer.param_groups[0]["lr"] is lr
        assert lr.item() == 1.5

    ranks(2, body)
