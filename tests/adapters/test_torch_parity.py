"""Several ranks train as one process does on all of their data, and end with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

STEPS = 25
PER_RANK = 4
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def make_model(seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10), nn.Tanh(), nn.Linear(10, 3)
    ).double()  # fmt: skip
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 4)
    return model


def make_data(size):
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(STEPS, size * PER_RANK, 1, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 3, (STEPS, size * PER_RANK), generator=generator)


def train(model, optimizer, images, labels, micro=1):
    for image, label in zip(images, labels, strict=True):
        optimizer.zero_grad()
        for part_of_image, part_of_label in zip(image.chunk(micro), label.chunk(micro), strict=True):
            (nn.functional.cross_entropy(model(part_of_image), part_of_label) / micro).backward()
        optimizer.step()
    return torch.cat([p.data.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("variant", ["plain", "groups", "micro batches"])
def test_ranks_train_as_one_process_does(ranks, size, kind, variant):
    images, labels = make_data(size)
    alone = make_model(seed=0)
    expected = train(alone, OPTIMIZERS[kind](alone.parameters()), images, labels)
    micro = 2 if variant == "micro batches" else 1

    def body(rank):
        model = make_model(seed=rank)  # different, until they are broadcast
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[kind](model.parameters()),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=micro,
            groups=2 if variant == "groups" else None,
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        mine = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        return train(model, optimizer, images[:, mine], labels[:, mine], micro)

    weights = ranks(size, body, timeout=60.0)
    for other in weights[1:]:
        assert torch.equal(other, weights[0])
    torch.testing.assert_close(weights[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_is_repeatable_to_the_bit(ranks, dtype):
    images, labels = make_data(3)

    def body(rank):
        model = make_model(seed=0).to(dtype)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        mine = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        return train(model, optimizer, images[:8, mine].to(dtype), labels[:8, mine])

    runs = [weights for _ in range(3) for weights in ranks(3, body)]
    assert all(torch.equal(run, runs[0]) for run in runs)
