"""Which of several ways is the fastest on this machine: all ranks try them together, and agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.collectives.base import Array

_TURNS = 5  # of each way, after one that warms up


def fastest(ways: Sequence[Callable[[], None]], add_up: Callable[[Array], None]) -> int:
    """Return the number of the way with the least median time of all ranks together. Collective.

    Args:
        ways: each called six times, in turn.
        add_up: sums a float64 array over the ranks, in place, to the same bits on all.
    """
    seconds = np.empty((_TURNS + 1, len(ways)))
    for turn in seconds:
        for number, way in enumerate(ways):
            begun = time.perf_counter()
            way()
            turn[number] = time.perf_counter() - begun
    medians = np.median(seconds[1:], axis=0)
    add_up(medians)
    return int(np.argmin(medians))
