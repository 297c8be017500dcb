"""`bench scale`: a recorded step on 8 to 4096 ranks, by the model of `replay.py`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdlite.bench import cluster, output, replay
from hvdlite.bench import step as steps
from hvdlite.bench.cluster import Cluster
from hvdlite.bench.replay import Prediction
from hvdlite.bench.step import Step
from hvdlite.bench.table import render
from hvdlite.bench.units import show_bytes, show_rate, show_time


def run(options: argparse.Namespace) -> None:
    """Print the prediction for each link speed and number of ranks. Starts no ranks."""
    step = steps.read(Path(options.step))
    if options.bucket:
        step = steps.bucketed(step, options.bucket)
    machine = cluster.read(Path(options.cluster)) if options.cluster else Cluster(ranks_per_node=8)
    rates = options.rates or [machine.bandwidth]
    print(
        f"{step.name}: {show_time(step.seconds)} on one rank, {show_bytes(step.nbytes)} in {len(step.gradients)} pieces"
        f"; {machine.ranks_per_node} ranks per node; computing varies by "
        f"{step.spread if options.jitter is None else options.jitter:.1%}"
    )
    by_rate = {rate: predict_all(step, options.ranks, machine, rate, options) for rate in rates}
    results = []
    for rate, predictions in by_rate.items():
        print(f"\nlinks of {show_rate(rate)}")
        print(table(predictions))
        results += [{"bandwidth": rate, **as_row(prediction)} for prediction in predictions]
    found = {"step": dataclasses.asdict(step), "cluster": dataclasses.asdict(machine), "results": results}
    output.finish(options, found, lambda path: draw(by_rate, path))


def predict_all(
    step: Step, ranks: Sequence[int], machine: Cluster, rate: float, options: argparse.Namespace
) -> list[Prediction]:
    """Return the predictions for links of one speed."""
    linked = dataclasses.replace(machine, bandwidth=rate)
    return [
        replay.predict(step, n, linked, algorithm=options.algorithm, fusion=options.fusion, jitter=options.jitter)
        for n in ranks
    ]


def as_row(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON has it."""
    outcome = prediction.outcome
    return {
        "ranks": prediction.ranks,
        "efficiency": prediction.efficiency,
        "hidden": outcome.hidden,
        **dataclasses.asdict(outcome),
    }


def table(predictions: Sequence[Prediction]) -> str:
    """Return the predictions as text."""
    head = ["ranks", "step", "efficiency", "communication", "hidden", "batches"]
    rows = [
        (
            one.ranks, show_time(one.outcome.seconds), f"{one.efficiency:.1%}",
            show_time(one.outcome.communicating), f"{one.outcome.hidden:.0%}", one.outcome.batches,
        )
        for one in predictions
    ]  # fmt: skip
    return render(head, rows)


def draw(by_rate: dict[float, list[Prediction]], path: str) -> None:
    """Plot efficiency over ranks, one line for each link speed."""
    figure, axes = output.figure("ranks", "scaling efficiency")
    for rate, predictions in by_rate.items():
        axes.plot(
            [p.ranks for p in predictions], [p.efficiency for p in predictions], marker="o", label=show_rate(rate)
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.05)
    axes.legend()
    figure.savefig(path, dpi=120)
