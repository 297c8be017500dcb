"""Where the time for reducing gradients went, and how much of it backward() hid."""

from __future__ import annotations

from typing import NamedTuple


class Overlap(NamedTuple):
    """Where the time for reducing gradients went on this rank, since the optimizer was wrapped.

    Attributes:
        rounds: of reduced gradients; one for each step, mostly.
        reducing: seconds for which gradients were reduced.
        hidden: seconds of these while backward() still ran.
        waited: seconds for which the program waited for gradients: what communication costs where cores are not scarce.
    """

    rounds: int
    reducing: float
    hidden: float
    waited: float

    @property
    def share(self) -> float:
        """The part of reducing that was hidden, from 0 to 1."""
        return self.hidden / self.reducing if self.reducing else 0.0
