"""Contenders take turns in one job, so that a drift of the machine's speed hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

TURNS = 10  # of each contender
WARM_UP = 3  # repetitions at the start of a turn, not counted


class Ranks(Protocol):
    """What is needed of a communicator; MPI's has it."""

    rank: int
    size: int

    def Barrier(self) -> None: ...

    def allgather(self, value: Any) -> list[Any]: ...

    def bcast(self, value: Any) -> Any: ...


class Alone:
    """The communicator of a process that has no others."""

    rank, size = 0, 1

    def Barrier(self) -> None:
        """Nobody to wait for."""

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def bcast(self, value: Any) -> Any:
        return value


class Times(NamedTuple):
    """Seconds of a repetition over all repetitions: the middle, and what a tenth is below and above."""

    median: float
    p10: float
    p90: float


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    repetitions: int,
    comm: Ranks,
    *,
    before: Callable[[str], None] = lambda name: None,
    after_turn: Callable[[str], None] = lambda name: None,
    turns: int = TURNS,
) -> dict[str, list[float]]:
    """Return the seconds of each repetition by contender: those of the slowest rank. Collective.

    MPI is silent within a turn: a rank that waits in an MPI call spins, and takes the core from others.

    Args:
        before: called before each repetition, not timed.
        after_turn: called after each turn, to check what was computed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    turn = max(1, repetitions // turns)
    for _ in range(-(-repetitions // turn)):
        for name, run in contenders.items():
            took = []
            comm.Barrier()
            for _ in range(WARM_UP + turn):
                before(name)
                started = time.perf_counter()
                run()
                took.append(time.perf_counter() - started)
            after_turn(name)
            everyone = comm.allgather(took[WARM_UP:])
            seconds[name].extend(map(max, zip(*everyone, strict=True)))
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median by contender."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def times(seconds: Sequence[float]) -> Times:
    """Return what is printed of many repetitions."""
    if len(seconds) == 1:
        return Times(seconds[0], seconds[0], seconds[0])
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return Times(statistics.median(seconds), tenths[0], tenths[-1])
