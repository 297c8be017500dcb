"""`bench train`: synthetic training by hvdlite.torch, by DDP over gloo, and without communication, in turn.

The only module of this package that cannot be imported without torch.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.bench import output, peers
from hvdlite.bench import step as steps
from hvdlite.bench.step import Gradient, Step
from hvdlite.bench.table import render
from hvdlite.bench.turns import Ranks, take_turns, times

CLASSES = 10
WARM_UP = 8  # steps before a record: memory grows, caches fill
RECORDED = 30  # steps of which a record is the median

Wrapped = tuple[Callable[[torch.Tensor], torch.Tensor], Any]
Wrap = Callable[[nn.Module, torch.optim.Optimizer], Wrapped]


def run(options: argparse.Namespace) -> None:
    """Train each network, and print steps per second on rank 0. Collective."""
    hvd.init()
    torch.set_num_threads(options.threads)
    comm = peers.ranks()
    made = [(text, *network(text)) for text in options.network]
    if options.record:
        _record(options, made, comm)
        return
    folder = peers.start_gloo(comm) if "ddp" in options.vs else ""
    results = []
    for text, make, shape in made:
        images, labels = batch(options.batch, shape, comm.rank)
        trainings = {
            name: Training(make(), wrap, images, labels)
            for name, wrap in WRAPS.items()
            if name.startswith("hvdlite") or name in options.vs
        }
        taken = take_turns({name: one.step for name, one in trainings.items()}, options.repetitions, comm)
        check(trainings, comm)
        results.append({"network": text, "ranks": comm.size, **summary(trainings, taken)})
        if comm.rank == 0:
            print(f"{'' if len(results) == 1 else chr(10)}{show(results[-1], options.batch)}", flush=True)
        del trainings
    if comm.rank == 0:
        facts = {"machine": peers.machine(comm), "results": results}
        output.finish(options, facts, lambda path: draw(results, path))
    if folder:
        peers.stop_gloo(folder, comm)


def _record(options: argparse.Namespace, made: Sequence[Any], comm: Ranks) -> None:
    if len(made) != 1:
        raise ValueError(f"--record writes one step: name one --network, not {len(made)}")
    ((text, make, shape),) = made
    recorded = record(Training(make(), alone, *batch(options.batch, shape, comm.rank)), text)
    if comm.rank == 0:
        steps.write(recorded, Path(options.record))
        print(f"recorded in {options.record}: {len(recorded.gradients)} gradients, {recorded.seconds * 1e3:.1f} ms")


def batch(samples: int, shape: Sequence[int], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return made-up samples, others on each rank, and their classes."""
    images = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(rank))
    return images, torch.arange(samples) % CLASSES


def summary(trainings: dict[str, Training], taken: dict[str, list[float]]) -> dict[str, Any]:
    """Return what is known of one network: its size, and for each contender times, efficiency and overlap.

    Scaling efficiency is steps per second by those of ranks that do not communicate; None if none such ran. Overlap is
    of hvdlite: seconds a step that reducing took, the share of them while backward() ran, and seconds waited.
    """
    found = {name: times(values) for name, values in taken.items()}
    contenders = {}
    for name, one in found.items():
        row: dict[str, Any] = {**one._asdict(), "steps_per_second": 1 / one.median}
        row["efficiency"] = found["none"].median / one.median if "none" in found else None
        if name.startswith("hvdlite"):
            overlap = trainings[name].optimizer.overlap
            rounds = max(1, overlap.rounds)
            row |= {"reducing": overlap.reducing / rounds, "hidden": overlap.share, "waited": overlap.waited / rounds}
        contenders[name] = row
    parameters = sum(p.numel() for p in trainings["hvdlite"].model.parameters())
    return {"parameters": parameters, "contenders": contenders}


def show(result: dict[str, Any], samples: int) -> str:
    """Return a table with a row for each contender."""
    head = ["", "steps/s", "efficiency", "median ms", "p10", "p90", "reducing ms", "hidden", "waited ms"]
    rows = []
    for name, one in result["contenders"].items():
        cells = [name, f"{one['steps_per_second']:.1f}"]
        cells.append("" if one["efficiency"] is None else f"{one['efficiency']:.2f}")
        cells += [f"{one[key] * 1e3:.2f}" for key in ("median", "p10", "p90")]
        if "reducing" in one:
            cells += [f"{one['reducing'] * 1e3:.2f}", f"{one['hidden']:.0%}", f"{one['waited'] * 1e3:.2f}"]
        rows.append(cells + [""] * (len(head) - len(cells)))
    title = f"{result['network']}, {result['parameters']:,} parameters, {samples} samples per rank"
    return f"{title}, {result['ranks']} ranks\n{render(head, rows)}"


def draw(results: Sequence[dict[str, Any]], path: str) -> None:
    """Plot a bar of steps per second for each contender of each network."""
    figure, axes = output.figure("", "steps per second")
    for result in results:
        labels = [f"{name}\n{result['network']}" for name in result["contenders"]]
        speeds = [one["steps_per_second"] for one in result["contenders"].values()]
        axes.bar(labels, speeds)
    figure.savefig(path, dpi=120)


class Training:
    """One contender: a network, and how it is trained."""

    def __init__(self, model: nn.Module, wrap: Wrap, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels, self.model = images, labels, model
        self.forward, self.optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))

    def step(self) -> None:
        """Run zero_grad, forward, backward and step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def loss(self) -> torch.Tensor:
        """Run forward."""
        return cross_entropy(self.forward(self.images), self.labels)


def record(training: Training, name: str) -> Step:
    """Return the median of some steps: when each gradient was ready, and what forward, backward and step took."""
    parameters = list(training.model.parameters())
    ready = [0.0] * len(parameters)

    def note(i: int) -> Callable[[torch.Tensor], None]:
        def noted(_: torch.Tensor) -> None:
            ready[i] = time.perf_counter()

        return noted

    hooks = [p.register_post_accumulate_grad_hook(note(i)) for i, p in enumerate(parameters)]
    rows = []
    for _ in range(WARM_UP):
        training.step()
    for _ in range(RECORDED):
        started = time.perf_counter()
        training.optimizer.zero_grad()
        loss = training.loss()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        training.optimizer.step()
        rows.append(
            [forward - started, backward - started, time.perf_counter() - started, *(t - started for t in ready)]
        )
    for hook in hooks:
        hook.remove()
    forward, backward, whole, *times_ready = map(float, np.median(np.array(rows), axis=0))
    low, high = np.quantile([row[2] for row in rows], [0.25, 0.75])  # what is beyond may be other programs
    spread = float((high - low) / 2 / NormalDist().inv_cdf(0.75) / whole)
    nbytes = [p.numel() * p.element_size() for p in parameters]
    gradients = sorted((Gradient(min(t, backward), n) for t, n in zip(times_ready, nbytes, strict=True)), key=_when)
    return Step(name, forward, backward - forward, max(0.0, whole - backward), tuple(gradients), spread)


def _when(gradient: Gradient) -> float:
    return gradient.ready


def by_hvdlite(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def by_views(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    named = model.named_parameters()
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=named, gradient_as_bucket_view=True)


def by_ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    return model, optimizer


WRAPS: Mapping[str, Wrap] = {"hvdlite": by_hvdlite, "hvdlite views": by_views, "ddp": by_ddp, "none": alone}


def check(trainings: dict[str, Training], comm: Ranks) -> None:
    """Fail unless all that communicate have the same weights on all ranks, and as DDP has them."""
    for name, training in trainings.items():
        if name == "none":
            continue
        mine = [p.detach().numpy() for p in training.model.parameters()]
        sums = comm.allgather([float(one.sum(dtype=np.float64)) for one in mine])
        if any(one != sums[0] for one in sums):
            raise RuntimeError(f"{name}: ranks have different weights")
        if "ddp" in trainings:
            for one, theirs in zip(mine, trainings["ddp"].model.parameters(), strict=True):
                np.testing.assert_allclose(one, theirs.detach().numpy(), rtol=1e-3, atol=1e-4)


def network(text: str) -> tuple[Callable[[], nn.Module], Sequence[int]]:
    """Return what makes a network, and the shape of one sample: `conv32,64,64` or `mlp1024,2048,10`.

    Raises:
        ValueError: the text is neither.
    """
    kind, numbers = text[:4].rstrip("0123456789"), text.lstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        widths = [int(one) for one in numbers.split(",")]
    except ValueError:
        widths = []
    if kind == "mlp" and len(widths) > 1 and min(widths) > 0:
        return lambda: perceptron(widths), (widths[0],)
    if kind == "conv" and 1 <= len(widths) <= 4 and min(widths) > 0:
        return lambda: convolutional(widths), (3, 32, 32)
    raise ValueError(f"--network {text!r}: write mlp and widths (mlp1024,2048,10), or conv and channels (conv32,64,64)")


def perceptron(widths: Sequence[int]) -> nn.Module:
    """Return a multilayer perceptron; the last width must be that of the classes or more."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([nn.ReLU(), nn.Linear(widths[-1], CLASSES)] if widths[-1] < CLASSES else []))


def convolutional(channels: Sequence[int]) -> nn.Module:
    """Return a convolutional network for images of 32x32 pixels, each layer of which halves them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise([3, *channels]):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    side = 32 >> len(channels)
    head = [nn.Flatten(), nn.Linear(channels[-1] * side**2, 512), nn.ReLU(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*layers, *head)
