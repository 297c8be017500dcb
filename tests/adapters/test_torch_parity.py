"""Several ranks train as one process does on all of their data, and end with the same bits."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

PER_RANK = 6
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}
ACCEPTED = ["sgd", "adam", "adamw", "adagrad"]


def make_model(seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10), nn.Tanh(), nn.Linear(10, 3)
    ).double()  # fmt: skip
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 4)
    return model


def make_data(steps, size):
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(steps, size * PER_RANK, 1, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 3, (steps, size * PER_RANK), generator=generator)


def train(model, optimizer, images, labels, micro=1):
    for image, label in zip(images, labels, strict=True):
        optimizer.zero_grad()
        for part_of_image, part_of_label in zip(image.chunk(micro), label.chunk(micro), strict=True):
            (nn.functional.cross_entropy(model(part_of_image), part_of_label) / micro).backward()
        optimizer.step()
    return weights_of(model)


def weights_of(model):
    return torch.cat([p.data.reshape(-1) for p in model.parameters()])


@functools.cache
def train_alone(kind, steps, size):
    """The weights of one process after training on the data of `size` ranks."""
    model = make_model(seed=0)
    return train(model, OPTIMIZERS[kind](model.parameters()), *make_data(steps, size))


def groups_of(model, groups):
    params = list(model.parameters())
    return [[params[4], params[0]], params[1:3]] if groups == "list" else groups


def train_together(kind, steps, place, size, micro=1, groups=None, process_set=hvd.global_process_set, **options):
    """The weights of the rank that is number `place` of `size`, from the model of the first."""
    images, labels = make_data(steps, size)
    model = make_model(seed=place)  # different, until they are broadcast
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=micro,
        groups=groups_of(model, groups),
        process_set=process_set,
        **options,
    )
    root = process_set.ranks[0]
    hvd.broadcast_parameters(model.state_dict(), root, process_set)
    hvd.broadcast_optimizer_state(optimizer, root, process_set=process_set)
    mine = slice(place * PER_RANK, (place + 1) * PER_RANK)
    return train(model, optimizer, images[:, mine], labels[:, mine], micro)


def in_a_subset(size, rank, work):
    """Do `work` on all ranks but the second; it stays alone."""
    members = [0, *range(2, size + 1)]
    subset = hvd.add_process_set(members)
    return work(members.index(rank), process_set=subset) if rank in members else None


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("groups", [None, 2, "list"])
@pytest.mark.parametrize("views", [False, True], ids=["own", "views"])
@pytest.mark.parametrize("subset", [False, True], ids=["all", "subset"])
def test_ranks_train_as_one_process_does(ranks, size, kind, micro, groups, views, subset):
    steps = 6
    work = functools.partial(
        train_together, kind, steps, size=size, micro=micro, groups=groups, gradient_as_bucket_view=views
    )
    if subset:
        weights = ranks(size + 1, lambda rank: in_a_subset(size, rank, work))
        assert weights.pop(1) is None
    else:
        weights = ranks(size, work)
    assert all(torch.equal(other, weights[0]) for other in weights)
    torch.testing.assert_close(weights[0], train_alone(kind, steps, size), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_implementation_and_more_ranks_do_too(ranks, size, kind):
    weights = ranks(size, lambda rank: train_together(kind, 6, rank, size))
    assert all(torch.equal(other, weights[0]) for other in weights)
    torch.testing.assert_close(weights[0], train_alone(kind, 6, size), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize(
    "options",
    [{}, {"micro": 3, "groups": 2}, {"groups": "list", "gradient_as_bucket_view": True}],
    ids=["plain", "micro batches in groups", "views in a list of groups"],
)
def test_weights_have_the_same_bits_after_50_steps(ranks, size, kind, options):
    weights = ranks(size, lambda rank: train_together(kind, 50, rank, size, **options), timeout=60.0)
    assert all(torch.equal(other, weights[0]) for other in weights)
    torch.testing.assert_close(weights[0], train_alone(kind, 50, size), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_is_repeatable_to_the_bit(ranks, dtype):
    images, labels = make_data(8, 3)

    def body(rank):
        model = make_model(seed=0).to(dtype)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        mine = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        return train(model, optimizer, images[:, mine].to(dtype), labels[:, mine])

    runs = [weights for _ in range(3) for weights in ranks(3, body)]
    assert all(torch.equal(run, runs[0]) for run in runs)
