"""Several optimizers in one program: equal names, one model in parts, GANs, and one after the other."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])


def parameters(n=2, length=2):
    return [nn.Parameter(torch.full((length,), float(i))) for i in range(n)]


def wrapped(params, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)


def backward(params, factor):
    sum((p * (i + 1) * factor).sum() for i, p in enumerate(params)).backward()


def gradients(params):
    return [None if p.grad is None else p.grad[0].item() for p in params]


def weights_of(*models):
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


# Names


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("views", [False, True])
def test_two_optimizers_with_equal_names_do_not_meet(ranks, size, named, views):
    def body(rank):
        first, second = parameters(2), parameters(3, length=5)
        names = (lambda ps: [(f"{i}.weight", p) for i, p in enumerate(ps)]) if named else (lambda ps: None)
        one = wrapped(first, named_parameters=names(first), gradient_as_bucket_view=views)
        two = wrapped(second, named_parameters=names(second), gradient_as_bucket_view=views)
        for _ in range(2):
            one.zero_grad()
            two.zero_grad()
            backward(first, rank + 1)
            backward(second, 10.0 * (rank + 1))
            for optimizer in (one, two) if rank else (two, one):  # in another order on another rank
                optimizer.step()
            mean = (size + 1) / 2
            assert gradients(first) == [mean, 2 * mean]
            assert gradients(second) == [10 * mean, 20 * mean, 30 * mean]

    ranks(size, body)


# One model, several optimizers


@OPS
@pytest.mark.parametrize("views", [False, True])
def test_one_backward_may_serve_two_optimizers(ranks, op, views):
    def body(rank):
        params = parameters(4)
        one = wrapped(params[::2], op=op, gradient_as_bucket_view=views)
        two = wrapped(params[1::2], op=op, gradient_as_bucket_view=views)
        factor = 2 if op == hvd.Sum else 1
        for _ in range(2):
            one.zero_grad()
            two.zero_grad()
            backward(params, rank + 1)
            assert gradients(params) == [1.5 * factor * i for i in (1, 2, 3, 4)]
            one.step()
            two.step()
        assert [p[0].item() for p in params] == [i - 3.0 * factor * (i + 1) for i in range(4)]

    ranks(2, body)


def test_optimizers_may_have_different_passes_per_step(ranks):
    def body(rank):
        params = parameters(2)
        often, seldom = wrapped(params[:1]), wrapped(params[1:], backward_passes_per_step=2)
        for _ in range(2):
            seldom.zero_grad()
            for _ in range(2):
                often.zero_grad()
                backward(params, rank + 1)
                often.step()
            seldom.step()
            assert gradients(params) == [1.5, 6.0]
        assert [p[0].item() for p in params] == [-6.0, 1 - 12.0]

    ranks(2, body)


# GANs


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.d = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        for i, p in enumerate(self.parameters()):
            p.data.copy_(torch.cos(torch.arange(p.numel()) * (i + 1)).view_as(p) / 2)


def error_of(scores, label):
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def clear(model, optimizer, how):
    owner, set_to_none = how
    (model if owner == "model" else optimizer).zero_grad(set_to_none=set_to_none)


def train_d(gan, optimizer, real, noise, how):
    clear(gan.d, optimizer, how)
    fake = gan.g(noise)
    error_of(gan.d(real), 1.0).backward()
    error_of(gan.d(fake.detach()), 0.0).backward()
    optimizer.step()
    return fake


def train_g(gan, optimizer, fake, how, freeze):
    clear(gan.g, optimizer, how)
    gan.d.requires_grad_(not freeze)
    error_of(gan.d(fake), 1.0).backward()  # leaves gradients in D, unless it is frozen
    gan.d.requires_grad_(True)
    optimizer.step()


def train_gan(gan, d, g, data, how, freeze=False, generator_first=False):
    for real, noise in data:
        if generator_first:
            train_g(gan, g, gan.g(noise), how, freeze)
            train_d(gan, d, real, noise, how)
        else:
            fake = train_d(gan, d, real, noise, how)
            train_g(gan, g, fake, how, freeze)
    return weights_of(gan)


def gan_data(size):
    x = torch.sin(torch.arange(5 * size * 4 * 5, dtype=torch.float64) ** 2).view(5, size * 4, 5)
    return [(step[:, :3], step[:, 3:]) for step in x]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("passes", "op"), [(1, hvd.Average), (2, hvd.Average), (2, hvd.Sum)], ids=["1, average", "2, average", "2, sum"]
)
@pytest.mark.parametrize("how", [("model", True), ("optimizer", True), ("optimizer", False)], ids=str)
@pytest.mark.parametrize("freeze", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("generator_first", [False, True], ids=["d first", "g first"])
def test_a_gan_trains_as_in_one_process(ranks, size, passes, op, how, freeze, generator_first):
    data = gan_data(size)
    n = size if op == hvd.Sum else 1
    alone = Gan()
    d, g = torch.optim.SGD(alone.d.parameters(), lr=0.5), torch.optim.Adam(alone.g.parameters(), lr=0.05)
    expected = train_gan(alone, d, g, data, how, freeze, generator_first)

    def body(rank):
        gan, mine = Gan(), slice(4 * rank, 4 * rank + 4)
        d = hvd.DistributedOptimizer(
            torch.optim.SGD(gan.d.parameters(), lr=0.5 / n),
            gan.d.named_parameters(),
            backward_passes_per_step=passes,
            op=op,
        )
        g = hvd.DistributedOptimizer(torch.optim.Adam(gan.g.parameters(), lr=0.05), gan.g.named_parameters())
        return train_gan(gan, d, g, [(r[mine], z[mine]) for r, z in data], how, freeze, generator_first)

    weights = ranks(size, body)
    assert all(torch.equal(other, weights[0]) for other in weights)
    torch.testing.assert_close(weights[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", [("model", True), ("optimizer", True), ("optimizer", False)], ids=str)
def test_gradients_left_over_from_another_loss_do_not_count(ranks, how):
    def body(rank):
        d, g = parameters(2), parameters(2)
        one, two = wrapped(d, op=hvd.Sum), wrapped(g, op=hvd.Sum)
        for _ in range(3):
            clear(nn.ParameterList(d), one, how)
            backward(d, rank + 1)
            one.step()
            clear(nn.ParameterList(g), two, how)
            backward([*d, *g], 100.0 * (rank + 1))
            two.step()
        assert [p[0].item() for p in d] == [-9.0, 1 - 18.0]
        assert [p[0].item() for p in g] == [-2700.0, 1 - 3600.0]

    ranks(2, body)


# One after the other


@OPS
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("old_one", ["deleted", "replaced", "kept"])
def test_only_the_new_optimizer_reduces(ranks, op, views, old_one):
    def body(rank):
        params = parameters(2)
        original = torch.optim.SGD(params, lr=1.0)
        optimizer = hvd.DistributedOptimizer(original, op=op, gradient_as_bucket_view=views)
        kept = [optimizer] if old_one == "kept" else []
        backward(params, rank + 1)
        optimizer.step()
        if old_one == "deleted":
            del optimizer
            gc.collect()
        optimizer = hvd.DistributedOptimizer(original, op=op, gradient_as_bucket_view=views)
        for _ in range(2):
            optimizer.zero_grad()
            backward(params, 10.0 * (rank + 1))
            optimizer.step()
            assert gradients(params) == ([30.0, 60.0] if op == hvd.Sum else [15.0, 30.0])
        del kept[:]

    ranks(2, body)


def test_without_its_optimizer_a_model_trains_alone(ranks):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params)
        backward(params, rank + 1)
        optimizer.step()
        del optimizer
        gc.collect()
        bare = torch.optim.SGD(params, lr=1.0)
        bare.zero_grad()
        if rank == 1:  # the other rank would be waited for
            backward(params, rank + 1)
            bare.step()
            assert gradients(params) == [2.0, 4.0]
        hvd.barrier()

    ranks(2, body)


def test_optimizers_of_different_process_sets_do_not_meet(ranks):
    def body(rank):
        evens, odds = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
        model = nn.Linear(2, 1, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        twin = copy.deepcopy(model)
        mine = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            process_set=odds if rank % 2 else evens,
        )
        everyones = hvd.DistributedOptimizer(torch.optim.SGD(twin.parameters(), lr=1.0), twin.named_parameters())
        for _ in range(2):
            mine.zero_grad()
            everyones.zero_grad()
            (model(torch.ones(2, dtype=torch.float64)) * (rank + 1)).sum().backward()
            (twin(torch.ones(2, dtype=torch.float64)) * (rank + 1)).sum().backward()
            mine.step()
            everyones.step()
        return model.bias.item(), twin.bias.item()

    assert ranks(4, body) == [(-4.0, -5.0), (-6.0, -5.0)] * 2
