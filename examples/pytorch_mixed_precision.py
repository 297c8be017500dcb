"""Train with 16-bit activations: autocast, a gradient scaler and clipping, in the order that PyTorch's manual shows.

    python examples/pytorch_mixed_precision.py
    hvdrun -np 2 python examples/pytorch_mixed_precision.py --dtype float16

Gradients are averaged over the ranks when backward() returns. So unscale_() and clip_grad_norm_() see what all ranks
have found, as they would with one rank, and a gradient that overflows on one rank makes all ranks skip the step.
Needs PyTorch 2.3 or newer, whose gradient scaler works on the CPU.

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
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)

    training, validation = load_data()
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)  # (hvd)
    batches = DataLoader(training, batch_size=options.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (hvd)
    # So high that float16 overflows at first: those steps are skipped. bfloat16 reaches as far as float32.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    skipped = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            scale = scaler.get_scale()
            train_step(model, optimizer, scaler, dtype, images, labels)
            skipped += scaler.get_scale() < scale

    with torch.no_grad(), torch.autocast("cpu", dtype):
        correct = (model(validation.tensors[0]).argmax(1) == validation.tensors[1]).double().mean().item()
    everywhere = hvd.allgather_object(skipped)  # (hvd)
    if hvd.rank() == 0:
        print(f"accuracy {100 * correct:.1f} % in {options.dtype}, skipped steps on each rank: {everywhere}")
    return 0


def train_step(model, optimizer, scaler, dtype, images, labels) -> None:
    """Take a step, unless a gradient is infinite on any rank."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype):
        loss = cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation images, flat, the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    validation, training = order[:N_VALIDATION], order[N_VALIDATION:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[validation], labels[validation])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with 16-bit activations.")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
