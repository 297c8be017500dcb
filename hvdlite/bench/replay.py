"""A recorded step on more ranks: gradients become ready, and the engine runs them batch by batch. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from hvdlite.bench.cluster import Cluster
from hvdlite.bench.cost import allreduce_seconds
from hvdlite.bench.step import Step, stretched

ALL_TO_ALL = 16  # ranks that tell each other directly how far they are
FUSION_BYTES = 64 * 2**20  # largest batch of several gradients: the default of hvdlite's fusion_threshold


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step became; seconds.

    Attributes:
        seconds: of the whole step.
        communicating: in which the engine was busy.
        exposed: in which the training waited for it after backward.
        batches: that the engine ran.
    """

    seconds: float
    communicating: float
    exposed: float
    batches: int

    @property
    def hidden(self) -> float:
        """The share of the communication that ran while backward did."""
        return 1 - self.exposed / self.communicating if self.communicating else 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row of the table: a step on `ranks` ranks."""

    ranks: int
    outcome: Outcome
    efficiency: float


def simulate(step: Step, batch_seconds: Callable[[int], float], fusion: int = FUSION_BYTES) -> Outcome:
    """Run one step: whatever is ready when the engine is free becomes its next batch, in order.

    Args:
        batch_seconds: from the bytes of a batch to the time that the engine needs for it.
        fusion: largest batch in bytes; a larger gradient is a batch of its own.
    """
    order = itertools.count()
    events: list[tuple[float, int, int]] = []  # time, order, bytes of a gradient; -1 when a batch is done
    for gradient in step.gradients:
        heapq.heappush(events, (gradient.ready, next(order), gradient.nbytes))
    ready: deque[int] = deque()
    now, communicating, batches, busy = 0.0, 0.0, 0, False
    while events:
        now, _, nbytes = heapq.heappop(events)
        if nbytes < 0:
            busy = False
        else:
            ready.append(nbytes)
        if busy or not ready:
            continue
        batch = _take(ready, fusion)
        seconds = batch_seconds(batch)
        heapq.heappush(events, (now + seconds, next(order), -1))
        busy, communicating, batches = True, communicating + seconds, batches + 1
    waited = max(0.0, now - step.computed)
    return Outcome(step.computed + waited + step.optimizer, communicating, waited, batches)


def _take(ready: deque[int], fusion: int) -> int:
    batch = ready.popleft()
    while ready and batch + ready[0] <= fusion:
        batch += ready.popleft()
    return batch


def predict(
    step: Step,
    ranks: int,
    cluster: Cluster,
    *,
    algorithm: str = "auto",
    fusion: int = FUSION_BYTES,
    jitter: float | None = None,
) -> Prediction:
    """Return the step on `ranks` ranks, and its weak-scaling efficiency: one rank's time by this one.

    Args:
        jitter: standard deviation of a rank's computing time, as a share of it; None is the recorded step's spread.
            Every batch waits for the slowest rank, so what counts is the expected largest of `ranks` values.
    """
    slowest = stretched(step, 1 + (step.spread if jitter is None else jitter) * expected_largest(ranks))
    if ranks == 1:
        return Prediction(1, Outcome(step.seconds, 0.0, 0.0, 0), 1.0)

    agreeing = cluster.per_batch + agreement_seconds(ranks, cluster)

    def batch_seconds(nbytes: int) -> float:
        return agreeing + allreduce_seconds(nbytes, ranks, cluster, algorithm)

    outcome = simulate(slowest, batch_seconds, fusion)
    return Prediction(ranks, outcome, step.seconds / outcome.seconds)


def agreement_seconds(ranks: int, cluster: Cluster) -> float:
    """Return what agreeing on a batch takes longer than between two hosts, of which `per_batch` has been measured.

    Up to 16 ranks each tells all others; more tell each other up and down a tree (decision 0011).
    """
    nodes = cluster.nodes(ranks)
    if nodes <= 2 or ranks <= ALL_TO_ALL:
        return 0.0
    return (2 * math.ceil(math.log2(nodes)) - 1) * (cluster.latency + cluster.switch_latency)


def expected_largest(n: int) -> float:
    """Return about the expected largest of `n` normal values, in standard deviations (Blom's approximation)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0
