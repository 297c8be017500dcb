"""`bench calibrate`: latency, bandwidth and cost per batch of this job, as a file for `bench scale`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import hvdlite as hvd
from hvdlite.bench import cluster, peers
from hvdlite.bench.cluster import Cluster
from hvdlite.bench.operations import Case
from hvdlite.bench.turns import Ranks, medians, take_turns
from hvdlite.bench.units import show_bytes, show_time
from hvdlite.config import set_environment

CHUNK = 512 * 2**10  # the default of hvdlite's ring_chunk
TREE = (1024, 16 * 2**10)
# The least for the latency of its steps; no size between, as shaped links let short bursts pass at a higher rate.
RING = (1024, 4 * 2**20, 8 * 2**20, 16 * 2**20)
PAUSE = 5e-3  # seconds of computing before each allreduce, so that the engines sleep as they do in training


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured allreduce: time = per_batch + `latencies` · latency + `nbytes` / bandwidth."""

    latencies: int
    nbytes: float
    seconds: float


def run(options: argparse.Namespace) -> None:
    """Measure allreduces of some sizes, fit the model to them, and print the cluster. Collective."""
    hvd.init()
    comm = peers.ranks()
    if comm.size == 1:
        raise ValueError("bench calibrate measures what is between ranks: start two or more")
    spread = hvd.cross_size() > 1
    if spread and hvd.local_size() > 1:
        raise ValueError("bench calibrate: start one rank on each host; calibrate a host by itself, with its ranks")
    samples = _between_hosts(comm) if spread else _on_one_host(comm)
    found = fit(samples)
    adding = _reduce_bandwidth()
    if spread:
        made = Cluster(
            bandwidth=found.bandwidth, latency=found.latency, per_batch=found.per_batch, reduce_bandwidth=adding,
            chunk=CHUNK,
        )  # fmt: skip
    else:
        made = Cluster(
            ranks_per_node=comm.size, node_bandwidth=found.bandwidth, node_latency=1e-6, per_batch=found.per_batch,
            reduce_bandwidth=adding,
        )  # fmt: skip
    if comm.rank == 0:
        title = f"measured by bench calibrate on {comm.size} ranks"
        text = cluster.render(made, title)
        print(text)
        print(
            "\n".join(
                f"# {show_bytes(size)}: {show_time(s.seconds)}" for size, s in zip(TREE + RING, samples, strict=True)
            )
        )
        if options.output:
            Path(options.output).write_text(text)


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds per batch and per message, and bytes per second."""

    per_batch: float
    latency: float
    bandwidth: float


def fit(samples: Sequence[Sample]) -> Fit:
    """Return the numbers that meet the samples best, in relative terms; none is below zero.

    Raises:
        ValueError: time does not grow with bytes, so there is no bandwidth to be found.
    """
    matrix = np.array([[1.0, s.latencies, s.nbytes] for s in samples])
    seconds = np.array([s.seconds for s in samples])
    weighted = matrix / seconds[:, None]
    columns = [i for i in range(3) if weighted[:, i].any()]
    while True:
        # Columns differ by nine orders of magnitude.
        scale = np.linalg.norm(weighted[:, columns], axis=0)
        solution = np.linalg.lstsq(weighted[:, columns] / scale, np.ones(len(samples)), rcond=None)[0] / scale
        if (solution >= 0).all() or len(columns) == 1:
            break
        columns.pop(int(np.argmin(solution * scale)))
    values = dict(zip(columns, map(float, solution), strict=True))
    if values.get(2, 0.0) <= 0:
        raise ValueError("time does not grow with bytes: the machine is too busy to be calibrated")
    return Fit(values.get(0, 0.0), values.get(1, 0.0), 1 / values[2])


def expected(algorithm: str, nbytes: int, ranks: int, seconds: float, chunk: int = CHUNK) -> Sample:
    """Return the sample of an allreduce that took `seconds`, by the closed forms of `cost.py`."""
    if algorithm == "shared_memory":
        return Sample(0, nbytes, seconds)
    if algorithm == "tree":
        odd = ranks & (ranks - 1) != 0
        steps = int(math.log2(ranks)) + 2 * odd
        return Sample(steps, (steps + odd) * nbytes, seconds)
    steps = 2 * (ranks - 1)
    streaming = nbytes / ranks > chunk  # several chunks of a step are on their way: only the last waits
    return Sample(1 if streaming else steps, steps * nbytes / ranks, seconds)


def _between_hosts(comm: Ranks) -> list[Sample]:
    samples = []
    for backend, sizes in [("tree", TREE), ("ring", RING)]:
        hvd.shutdown()
        set_environment({"HVDLITE_BACKEND": backend})
        hvd.init()
        samples += [expected(backend, size, comm.size, _seconds(size, comm)) for size in sizes]
    return samples


def _on_one_host(comm: Ranks) -> list[Sample]:
    return [expected("shared_memory", size, comm.size, _seconds(size, comm)) for size in TREE + RING]


def _seconds(nbytes: int, comm: Ranks) -> float:
    case = Case("allreduce", nbytes, "float32", comm.rank, comm.size, tensors="numpy", memory="private")
    runs = {"hvdlite": _from_behind(case)}
    repetitions = 6 if nbytes > 2**20 else 40

    def before(name: str) -> None:
        case.fill(name)
        comm.Barrier()
        time.sleep(PAUSE)

    taken = take_turns(runs, repetitions, comm, before=before, after_turn=case.check, turns=2)
    return medians(taken)["hvdlite"]


def _from_behind(case: Case) -> Callable[[], None]:
    """Return an allreduce by the engine's own thread, as training has it, instead of by the caller that waits."""
    case.contender("hvdlite")
    array, name = case.array, f"calibrate.{case.nbytes}"

    def run() -> None:
        handle = hvd.allreduce_async_(array, name=name, op=hvd.Sum)
        while not hvd.poll(handle):
            time.sleep(50e-6)
        hvd.synchronize(handle)

    return run


def _reduce_bandwidth() -> float:
    """Return bytes per second of one operand of an addition in the cache, as a ring's chunk is added."""
    ours, theirs = np.ones(CHUNK // 4, np.float32), np.ones(CHUNK // 4, np.float32)
    best = math.inf
    for _ in range(20):
        started = time.perf_counter()
        np.add(ours, theirs, out=ours)
        best = min(best, time.perf_counter() - started)
    return ours.nbytes / best
