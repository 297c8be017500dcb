"""Train a small GAN to draw points on a ring, on any number of ranks.

    python examples/pytorch_gan.py
    hvdrun -np 2 python examples/pytorch_gan.py

Two models take turns, so there are two distributed optimizers. That their parameters have the same names (0.weight,
0.bias, ...) does not matter: gradients of one are never mixed with those of the other.

Lines marked (hvd) are what makes it distributed.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import hvdlite.torch as hvd

N_NOISE = 4  # random numbers that a point is made from


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)

    generator, discriminator = make_model(N_NOISE, 2), make_model(2, 1)
    optimizers = []
    for model in (generator, discriminator):
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, betas=(0.5, 0.9))
        optimizers.append(hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))  # (hvd)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (hvd)

    torch.manual_seed(options.seed + 1 + hvd.rank())  # (hvd) the models are the same, and the data are not
    before = distance(generator)
    for _ in range(options.steps):
        train_step(generator, discriminator, *optimizers, options.batch_size)
    after = distance(generator)
    if hvd.rank() == 0:
        print(f"distance between drawn and real points: {before:.3f} before, {after:.3f} after training")
    return 0


def train_step(
    generator: nn.Module,
    discriminator: nn.Module,
    generator_optimizer: torch.optim.Optimizer,
    discriminator_optimizer: torch.optim.Optimizer,
    n: int,
) -> None:
    """Let the discriminator learn to tell `n` real points from drawn ones, then the generator to deceive it."""
    drawn = generator(torch.randn(n, N_NOISE))

    discriminator_optimizer.zero_grad()
    judged = discriminator(torch.cat([ring(n), drawn.detach()]))
    cross_entropy(judged, torch.cat([torch.ones(n, 1), torch.zeros(n, 1)])).backward()
    discriminator_optimizer.step()

    generator_optimizer.zero_grad()
    discriminator.requires_grad_(False)  # else its gradients would be computed, and reduced, for nothing
    cross_entropy(discriminator(drawn), torch.ones(n, 1)).backward()
    discriminator.requires_grad_(True)
    generator_optimizer.step()


@torch.no_grad()
def distance(generator: nn.Module, n: int = 1000) -> float:
    """Return the energy distance of drawn to real points: 0 if they are spread alike. Each rank looks at its own."""
    drawn, real = generator(torch.randn(n, N_NOISE)), ring(n)
    apart = 2 * torch.cdist(drawn, real).mean() - torch.cdist(drawn, drawn).mean() - torch.cdist(real, real).mean()
    return hvd.allreduce(apart, name="distance").item()  # (hvd)


def ring(n: int) -> torch.Tensor:
    """Return `n` random points near a circle of radius 1."""
    angle = 2 * torch.pi * torch.rand(n)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(n, 2)


def make_model(n_in: int, n_out: int, width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(n_in, width), nn.LeakyReLU(0.2),
        nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, n_out),
    )  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GAN to draw points on a ring.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=128, help="real points per rank and step")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
