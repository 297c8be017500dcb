"""Train with batches too large for one backward pass, in the two ways there are, and compare with the plain way.

    python examples/pytorch_accumulation.py
    hvdrun -np 2 python examples/pytorch_accumulation.py

A batch comes in pieces, whose gradients add up in each rank and are reduced after the last piece only, so accumulation
saves communication, too. The last batch of an epoch has fewer pieces, and nothing special is to be done about it.

Lines marked (hvd) are what makes it distributed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd

N_VALIDATION = 360  # of 1797 images
Batch = list[tuple[torch.Tensor, torch.Tensor]]  # images and labels of each piece


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # to compare to the last digits
    training, validation = load_data()

    plain = train(at_once, 1, training, options)
    by_count = train(piece_by_piece, options.pieces, training, options)
    by_hand = train(within_no_sync, 1, training, options)
    if hvd.rank() == 0:
        print(f"accuracy {accuracy(plain, validation):.1f} % with whole batches")
        print(f"backward_passes_per_step={options.pieces}: weights differ by {difference(by_count, plain):.0e} at most")
        print(f"no_sync(): weights differ by {difference(by_hand, plain):.0e} at most")
    return 0


def train(train_step, passes: int, training: TensorDataset, options: argparse.Namespace) -> nn.Module:
    """Return a model that was trained by calling `train_step` for each batch."""
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(  # (hvd)
        torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (hvd)
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)  # (hvd)
    pieces = DataLoader(training, batch_size=options.piece_size, sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch in gather(pieces, options.pieces):
            optimizer.zero_grad()
            train_step(model, optimizer, batch)
            optimizer.step()
    return model


def at_once(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One backward pass for the whole batch: what the others are measured by."""
    images, labels = (torch.cat(parts) for parts in zip(*batch, strict=True))
    cross_entropy(model(images), labels).backward()


def piece_by_piece(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """The optimizer counts: reducing starts in pass number backward_passes_per_step, or else in step()."""
    for piece in batch:
        share_of_loss(model, piece, batch).backward()


def within_no_sync(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """The script says which passes are not the last."""
    *others, last = batch
    with optimizer.no_sync():  # (hvd)
        for piece in others:
            share_of_loss(model, piece, batch).backward()
    share_of_loss(model, last, batch).backward()


def share_of_loss(model: nn.Module, piece: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return what a piece adds to the mean loss of its batch. Gradients of pieces are added up, not averaged."""
    images, labels = piece
    return cross_entropy(model(images), labels, reduction="sum") / sum(len(labels) for _, labels in batch)


def gather(pieces: DataLoader, n: int) -> Iterator[Batch]:
    """Yield batches of `n` pieces, and what is left at the end."""
    batch: Batch = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == n:
            yield batch
            batch = []
    if batch:
        yield batch


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return how far apart the weights of two models are, where they are farthest apart."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def accuracy(model: nn.Module, validation: TensorDataset) -> float:
    images, labels = validation.tensors
    return 100 * (model(images).argmax(1) == labels).double().mean().item()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation images, flat, the same on every rank."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    validation, training = order[:N_VALIDATION], order[N_VALIDATION:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[validation], labels[validation])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Accumulate gradients over several backward passes.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pieces", type=int, default=4, help="backward passes per step")
    parser.add_argument("--piece-size", type=int, default=8, help="images per rank and backward pass")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
