"""What tuning is worth: the default sizes against those that HVDLITE_AUTOTUNE=1 found, in the same job, in turn.

    hvdrun -np 2 python benchmarks/autotune.py [--case training] [--json results.json]

First the job tunes, until rank 0 has written what it found into a file. Then it runs with and without that file in
turn, and compares medians of the slowest rank's steps. Two cases: the gradients of ResNet-50 all at once, where
nothing is computed, and training of a perceptron, where communication hides behind backward().
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from allreduce import resnet50_gradients

import hvdlite.torch as hvd

Step = Callable[[], None]
TURNS = 8
WARM_UP = 8  # steps after hvdlite has started anew, not counted


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    hvd.init()
    place = hvd.broadcast_object(tempfile.mkdtemp(prefix="autotune-"))
    results = []
    for name, (make, steps) in CASES.items():
        if arguments.case not in ("", name):
            continue
        file = Path(place, f"{name}.json")
        tuning = tune(make, file, 3 if arguments.quick else 3000)
        seconds = compare(make, file, 2 if arguments.quick else TURNS, 2 if arguments.quick else steps)
        found = json.loads(file.read_text()) if file.exists() else {}
        results.append({"case": name, "tuning": tuning, "found": found, "median_seconds": seconds})
        if hvd.rank() == 0:
            ratio = seconds["default"] / seconds["tuned"]
            what = "  ".join(f"{way} {1e3 * s:8.2f} ms" for way, s in seconds.items())
            print(f"{name:<10} {what}   tuned is {ratio:.2f}x as fast; {tuning['steps']} steps of tuning", flush=True)
            print(f"           found: {found.get('knobs', 'nothing yet')}, gain {found.get('gain', 0)}", flush=True)
    if hvd.rank() == 0 and arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--case", choices=CASES, default="", help="only this one")
    parser.add_argument("--quick", action="store_true", help="few steps: does it run at all?")
    return parser.parse_args()


def gradients() -> Step:
    """Return a step that sums the 161 gradients of ResNet-50 (102 MB), given all at once."""
    tensors = [torch.zeros(n) for n in resnet50_gradients()]

    def step() -> None:
        handles = [hvd.allreduce_async_(t, name=f"t{i}", op=hvd.Sum) for i, t in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    return step


def training() -> Step:
    """Return a step that trains a perceptron of 10 million parameters (40 MB)."""
    torch.manual_seed(0)
    layers = [layer for _ in range(9) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    inputs, targets = torch.randn(32, 1024), torch.randint(10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def tune(make: Callable[[], Step], file: Path, most: int) -> dict[str, float]:
    """Run steps until tuning has settled, which is when its file is there."""
    restart(HVDLITE_AUTOTUNE="1", HVDLITE_AUTOTUNE_FILE=str(file))
    step, started, n = make(), time.perf_counter(), 0
    while n < most:
        for _ in range(min(most, 20)):
            step()
            n += 1
        if hvd.broadcast_object(file.exists(), name="settled?"):
            break
    return {"steps": n, "seconds": time.perf_counter() - started}


def compare(make: Callable[[], Step], file: Path, turns: int, steps: int) -> dict[str, float]:
    """Return the median seconds of a step by way: those of the slowest rank."""
    seconds: dict[str, list[float]] = {"default": [], "tuned": []}
    for turn in range(turns):
        for way in sorted(seconds, reverse=turn % 2 == 1):  # neither is always the first one
            restart(HVDLITE_AUTOTUNE="", HVDLITE_AUTOTUNE_FILE=str(file) if way == "tuned" else "")
            step, took = make(), []
            for _ in range(WARM_UP + steps):
                started = time.perf_counter()
                step()
                took.append(time.perf_counter() - started)
            seconds[way] += map(max, zip(*hvd.allgather_object(took[WARM_UP:]), strict=True))
    return {way: statistics.median(values) for way, values in seconds.items()}


def restart(**settings: str) -> None:
    """Start hvdlite anew with these settings; an empty one counts as unset."""
    hvd.shutdown()
    os.environ.update(settings)
    hvd.init()


CASES: dict[str, tuple[Callable[[], Step], int]] = {"gradients": (gradients, 10), "training": (training, 15)}

if __name__ == "__main__":
    main()
