"""Which sizes to try next, given how fast the earlier ones were. Pure: no clock, no engine.

One knob after the other, those that matter most first. Of a knob all values are tried, then the better half again,
until one is left (successive halving); so most samples go to the values that are hard to tell apart. In the end the
best point meets the default in pairs, side by side in time, and must win clearly: a machine's speed drifts by more
than most knobs are worth, and what is not clearly better is not worth being different.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from hvdlite.messages import Knobs
from hvdlite.topology import Topology

Grid = Mapping[str, Sequence[int]]

KIB, MIB = 2**10, 2**20
FUSION_THRESHOLDS = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
PIECES = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
RING_CHUNKS = (60 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB)
SMALL_MESSAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)

_CLEARLY = 0.02  # the best must be faster than the default by this share
_PAIRS, _FEW_PAIRS = 5, 3  # of samples in the end; few where there are few samples at all
_MANY_SAMPLES = 30


def grid_for(
    default: Knobs, topology: Topology, *, backend: str, shared_memory: bool, pinned: frozenset[str], step_bytes: int
) -> dict[str, list[int]]:
    """Return the values to try of each knob that can matter, the most important knob first.

    Args:
        backend, shared_memory: the settings.
        pinned: knobs that the user has set, and that stay.
        step_bytes: what a step of training moves. Sizes beyond it make no difference.
    """
    on_one_host = topology.n_hosts == 1 and shared_memory and backend in ("auto", "shared_memory")
    by_ring = backend == "ring" or (backend == "auto" and not on_one_host)
    grid: dict[str, list[int]] = {"fusion_threshold": [n for n in FUSION_THRESHOLDS if n < step_bytes]}
    if topology.n_hosts > 1 and topology.local_size > 1 and topology.is_homogeneous and backend == "auto":
        grid["hierarchical"] = [True, False]
    if on_one_host:
        grid["shared_memory_piece"] = [n for n in PIECES if n <= step_bytes]
    if by_ring:
        grid["ring_chunk"] = [n for n in RING_CHUNKS if n <= step_bytes]
    if topology.n_hosts > 1 and backend == "auto":
        grid["small_message"] = [n for n in SMALL_MESSAGES if n <= step_bytes]
    return {
        name: values
        for name, values in grid.items()
        if name not in pinned and [value for value in values if value != getattr(default, name)]
    }


class Search:
    """Proposes `current`, wants to be told its score, and so on until it is `done`; then `best` is the result.

    Args:
        default: is the result unless something is clearly better.
        budget: samples at most.
    """

    def __init__(self, default: Knobs, grid: Grid, budget: int) -> None:
        self.default = self.best = self.current = default
        self.gain = 0.0  # of `best` over the default, as a share, once it is done
        self.done = False
        self._left = budget
        self._steps = self._explore(grid)
        self._advance(None)

    def tell(self, score: float) -> None:
        """Say how well `current` did: the more the better."""
        self._left -= 1
        self._advance(score)

    def _advance(self, score: float | None) -> None:
        try:
            self.current = self._steps.send(score) if score is not None else next(self._steps)
        except StopIteration:
            self.current, self.done = self.best, True

    def _explore(self, grid: Grid) -> Generator[Knobs, float, None]:
        pairs = _PAIRS if self._left >= _MANY_SAMPLES else _FEW_PAIRS
        favourite = self.default
        for name, values in grid.items():
            others: list[Any] = [value for value in values if value != getattr(favourite, name)]
            rivals = [favourite, *(favourite._replace(**{name: value}) for value in others)]
            scores: dict[Knobs, list[float]] = {rival: [] for rival in rivals}
            while len(rivals) > 1 and self._left - 2 * pairs >= len(rivals):
                for rival in rivals:
                    scores[rival].append((yield rival))
                rivals.sort(key=lambda rival: statistics.median(scores[rival]), reverse=True)  # stable: ties stay
                del rivals[-(-len(rivals) // 2) :]
            if len(rivals) > 1 and not scores[rivals[0]]:
                break  # nothing is left to try this knob with
            favourite = rivals[0]
        if favourite != self.default and self._left >= 2 * _FEW_PAIRS:
            yield from self._meet_default(favourite, min(pairs, self._left // 2))

    def _meet_default(self, favourite: Knobs, pairs: int) -> Generator[Knobs, float, None]:
        gains = []
        for number in range(pairs):
            order = [self.default, favourite] if number % 2 == 0 else [favourite, self.default]  # a drift favours none
            scores = {}
            for one in order:
                scores[one] = yield one
            gains.append(scores[favourite] / scores[self.default] - 1 if scores[self.default] > 0 else 0.0)
        gain = statistics.median(gains)
        noise = statistics.median(abs(one - gain) for one in gains)
        if gain >= _CLEARLY and gain > noise:
            self.best, self.gain = favourite, gain
