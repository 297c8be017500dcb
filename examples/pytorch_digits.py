"""Train a small convolutional network on scikit-learn's handwritten digits, on any number of ranks.

    python examples/pytorch_digits.py
    hvdrun -np 2 python examples/pytorch_digits.py
    mpirun -np 2 --bind-to none python examples/pytorch_digits.py

Lines marked (hvd) are what makes it distributed.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvdlite.torch as hvd

N_VALIDATION = 360  # of 1797 images


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # images of 8x8 pixels keep no second core busy, and ranks share the cores

    training, validation = load_data()
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)  # (hvd)
    batches = DataLoader(training, batch_size=options.batch_size, sampler=sampler)

    model = make_model()
    # Each step sees hvd.size() times as many images, so it may be longer.
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr * hvd.size() ** 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (hvd)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # (hvd)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(batches))

    started = time.perf_counter()
    progress = tqdm(total=options.epochs * len(batches), unit="step", disable=hvd.rank() != 0, mininterval=0.5)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, schedule, batches, progress)
        mean_loss = hvd.allreduce(loss, name="loss").item()  # (hvd)
        progress.set_description(f"epoch {epoch + 1}/{options.epochs}, loss {mean_loss:.3f}")
    progress.close()
    seconds = time.perf_counter() - started

    accuracy = evaluate(model, validation)
    if hvd.rank() == 0:
        print(
            f"accuracy {accuracy:.1f} %, {options.epochs * len(training) / seconds:.0f} samples/s "
            f"over {hvd.size()} rank{'s' if hvd.size() > 1 else ''}, "
            f"waited {100 * optimizer.seconds_waited / seconds:.0f} % of the time for communication"
        )
    return 0 if accuracy >= options.min_accuracy else 1


def train_epoch(model, optimizer, schedule, batches, progress) -> torch.Tensor:
    """Train on this rank's share of the data, and return the mean loss of this rank."""
    model.train()
    total = torch.zeros(())
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach()
        progress.update()
    return total / len(batches)


@torch.no_grad()
def evaluate(model: nn.Module, validation: TensorDataset) -> float:
    """Return the accuracy on all validation images in percent; each rank looks at its share."""
    model.eval()
    images, labels = validation[hvd.rank() :: hvd.size()]
    correct = (model(images).argmax(1) == labels).sum()
    counts = hvd.allreduce(torch.stack([correct, torch.tensor(len(labels))]), op=hvd.Sum, name="accuracy")  # (hvd)
    return 100 * counts[0].item() / counts[1].item()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation images, the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    validation, training = order[:N_VALIDATION], order[N_VALIDATION:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[validation], labels[validation])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate for one rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this many percent")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
