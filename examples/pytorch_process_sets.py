"""Train two different models on two halves of the ranks at once, then let them vote.

    hvdrun -np 2 python examples/pytorch_process_sets.py
    hvdrun -np 4 python examples/pytorch_process_sets.py

Each half is a process set: its ranks average gradients with each other and know nothing of the other half. The vote is
over all ranks. With an odd number of ranks the halves differ by one rank; a single rank has one model only.

Lines marked (hvd) are what makes it distributed.
"""

from __future__ import annotations

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd

N_VALIDATION = 360  # of 1797 images


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    torch.set_num_threads(1)
    training, validation = load_data()

    halves = make_halves()
    mine = hvd.rank() % len(halves)
    half = halves[mine]
    torch.manual_seed(options.seed)
    model = (make_convolutional, make_plain)[mine]()
    train(model, half, training, options)

    # All ranks of a half have the same model; the votes of its first rank stand for it.
    with torch.no_grad():
        votes = model(validation.tensors[0]).softmax(1)
    of_halves = [hvd.broadcast(votes, half.ranks[0], name=f"votes.{i}") for i, half in enumerate(halves)]  # (hvd)
    if hvd.rank() == 0:
        for half, kind, votes in zip(halves, ("convolutional", "plain"), of_halves, strict=False):
            print(f"{kind} network on {half.size()} of {hvd.size()} ranks: {accuracy(votes, validation):.1f} %")
        print(f"their vote: {accuracy(sum(of_halves), validation):.1f} %")
    return 0


def make_halves() -> list[hvd.ProcessSet]:
    """Return the set of even ranks and that of odd ones. Every rank makes both, member or not."""
    if hvd.size() == 1:
        return [hvd.global_process_set]
    return [hvd.add_process_set(range(first, hvd.size(), 2)) for first in (0, 1)]  # (hvd)


def train(model: nn.Module, half: hvd.ProcessSet, training: TensorDataset, options: argparse.Namespace) -> None:
    """Train `model` on all images, shared out among the ranks of `half`."""
    sampler = DistributedSampler(training, num_replicas=half.size(), rank=half.rank(), seed=options.seed)  # (hvd)
    batches = DataLoader(training, batch_size=options.batch_size // half.size(), sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(  # (hvd)
        optimizer, named_parameters=model.named_parameters(), process_set=half
    )
    # A root is a rank among all, not among those of the set.
    hvd.broadcast_parameters(model.state_dict(), root_rank=half.ranks[0], process_set=half)  # (hvd)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()


def accuracy(votes: torch.Tensor, validation: TensorDataset) -> float:
    """Return how many percent of the images get the most votes for what they are."""
    return 100 * (votes.argmax(1) == validation.tensors[1]).double().mean().item()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation images, the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    validation, training = order[:N_VALIDATION], order[N_VALIDATION:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[validation], labels[validation])


def make_convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)
    )  # fmt: skip


def make_plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train two models on two halves of the ranks.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=48, help="images per step, on all ranks of a half together")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
