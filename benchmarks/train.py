"""Training steps per second with hvdlite, with torch's DDP over gloo, and without communication.

    hvdrun -np 2 python benchmarks/train.py [--json results.json]
    python benchmarks/train.py

Two networks: a convolutional one of 0.6 million parameters, and a multilayer perceptron
of 10 million. Each contender has its own copy of the network and trains it on the same
batches, 32 samples per rank. One step is zero_grad, forward, backward and step of SGD with
momentum; the slowest rank's time counts. Without communication the ranks train apart:
what is left then is the computation, which nobody can beat.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from turns import connect, machine, medians, take_turns

import hvdlite.torch as hvd

BATCH = 32  # per rank
Step = Callable[[], None]


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    comm = connect()
    results = []
    for name, make, shape, repetitions in CASES:
        images = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(comm.rank))
        labels = torch.arange(BATCH) % 10
        trainings = {contender: Training(make(), wrap, images, labels) for contender, wrap in CONTENDERS.items()}
        steps = {contender: training.step for contender, training in trainings.items()}
        seconds = medians(take_turns(steps, 10 if arguments.quick else repetitions, comm))
        check(trainings)
        parameters = sum(p.numel() for p in trainings["none"].model.parameters())
        results.append(row(name, parameters, seconds, trainings))
        if comm.rank == 0:
            print(line(results[-1], comm.size), flush=True)
    if comm.rank == 0 and arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(comm), "results": results}, indent=2) + "\n")
    dist.destroy_process_group()


class Training:
    """One contender: a network, and how it is trained."""

    def __init__(self, model: nn.Module, wrap, images: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
        self.images, self.labels = images, labels
        self.model = model
        self.forward, self.optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.forward(self.images), self.labels).backward()
        self.optimizer.step()


def by_hvdlite(model: nn.Module, optimizer: torch.optim.Optimizer):  # type: ignore[no-untyped-def]
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def by_views(model: nn.Module, optimizer: torch.optim.Optimizer):  # type: ignore[no-untyped-def]
    named = model.named_parameters()
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=named, gradient_as_bucket_view=True)


def by_ddp(model: nn.Module, optimizer: torch.optim.Optimizer):  # type: ignore[no-untyped-def]
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def alone(model: nn.Module, optimizer: torch.optim.Optimizer):  # type: ignore[no-untyped-def]
    return model, optimizer


CONTENDERS = {"hvdlite": by_hvdlite, "hvdlite views": by_views, "ddp": by_ddp, "none": alone}


def check(trainings: dict[str, Training]) -> None:
    """Fail unless all that communicate have computed the same."""
    expected = list(trainings["ddp"].model.parameters())
    for name in ("hvdlite", "hvdlite views"):
        for mine, theirs in zip(trainings[name].model.parameters(), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def convolutional() -> nn.Module:
    """Return a network with 0.6 million parameters for images of 32x32 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def perceptron() -> nn.Module:
    """Return a network with 10 million parameters."""
    torch.manual_seed(0)
    widths = [1024, 2048, 2048, 1792, 10]
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


CASES = [("conv 0.6M", convolutional, (3, 32, 32), 300), ("MLP 10M", perceptron, (1024,), 150)]


def row(name: str, parameters: int, seconds: dict[str, float], trainings: dict[str, Training]) -> dict[str, object]:
    overlaps = {c: trainings[c].optimizer.overlap for c in ("hvdlite", "hvdlite views")}
    return {
        "network": name,
        "parameters": parameters,
        "steps_per_second": {contender: 1 / s for contender, s in seconds.items()},
        "efficiency": {contender: seconds["none"] / s for contender, s in seconds.items() if contender != "none"},
        "times_as_fast_as": {c: seconds[c] / seconds["hvdlite"] for c in seconds if c != "hvdlite"},
        "reducing_seconds_per_step": {c: o.reducing / max(1, o.rounds) for c, o in overlaps.items()},
        "hidden_share": {c: o.share for c, o in overlaps.items()},
        "waited_seconds_per_step": {c: o.waited / max(1, o.rounds) for c, o in overlaps.items()},
    }


def line(result: dict, ranks: int) -> str:  # type: ignore[type-arg]
    speeds = "  ".join(f"{name} {speed:6.1f}" for name, speed in result["steps_per_second"].items())
    efficiency = ", ".join(f"{name} {part:.2f}" for name, part in result["efficiency"].items())
    overlap = ", ".join(
        f"{name} {seconds * 1e3:.1f} ms a step, {result['hidden_share'][name]:.0%} of it while backward() ran, "
        f"waited {result['waited_seconds_per_step'][name] * 1e3:.1f} ms"
        for name, seconds in result["reducing_seconds_per_step"].items()
    )
    return (
        f"{result['network']:<10} on {ranks}, steps/s: {speeds}\n"
        f"           scaling efficiency: {efficiency}\n           reducing: {overlap}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="few steps: does it run at all?")
    return parser.parse_args()


if __name__ == "__main__":
    main()
