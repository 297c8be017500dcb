"""`bench replay`: run a recorded step for real, with sleep for computation and made-up gradients.

What is left is the communication: `bench scale` predicts the time of this, and `benchmarks/validate_scale.py`
holds one against the other.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.bench import output, peers
from hvdlite.bench import step as steps
from hvdlite.bench.step import Step
from hvdlite.bench.turns import take_turns, times
from hvdlite.bench.units import show_time


def run(options: argparse.Namespace) -> None:
    """Run the step `--repetitions` times, and print how long it takes. Collective."""
    step = steps.read(Path(options.step))
    if options.bucket:
        step = steps.bucketed(step, options.bucket)
    hvd.init()
    comm = peers.ranks()
    gradients = [np.zeros(-(-one.nbytes // 4), np.float32) for one in step.gradients]
    expected = float(sum(range(1, comm.size + 1)))

    def fill(_: str) -> None:
        for gradient in gradients:
            gradient.fill(comm.rank + 1)

    def check(_: str) -> None:
        if not all((gradient == expected).all() for gradient in gradients):
            raise RuntimeError(f"wrong sum on rank {comm.rank}")

    runs = {"step": lambda: rehearse(step, gradients)}
    taken = take_turns(runs, options.repetitions, comm, before=fill, after_turn=check, turns=1)
    found = times(taken["step"])
    if comm.rank == 0:
        print(
            f"{step.name} on {comm.size}: {show_time(found.median)} a step, p10 {show_time(found.p10)}, "
            f"p90 {show_time(found.p90)}; computing takes {show_time(step.seconds)} of it"
        )
        results = {"ranks": comm.size, "computed": step.seconds, **found._asdict()}
        output.finish(options, {"machine": peers.machine(comm), "results": results}, _no_picture)


def rehearse(step: Step, gradients: list[Any]) -> None:
    """Run one step: sleep until each gradient is ready, hand it over, and wait for all in the end."""
    started = time.perf_counter()
    handles = []
    for i, one in enumerate(step.gradients):
        _sleep_until(started + one.ready)
        handles.append(hvd.allreduce_async_(gradients[i], name=f"replay.{i}", op=hvd.Sum))
    _sleep_until(started + step.computed)
    for handle in handles:
        hvd.synchronize(handle)
    _sleep_until(time.perf_counter() + step.optimizer)


def _sleep_until(when: float) -> None:
    left = when - time.perf_counter()
    if left > 0:
        time.sleep(left)


def _no_picture(path: str) -> None:
    raise ValueError(f"--plot {path}: bench replay has nothing to draw")
