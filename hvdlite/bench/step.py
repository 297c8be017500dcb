"""A recorded training step: what one rank computes, and when each gradient is ready to be sent. Values and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FORMAT = 1  # of the file


@dataclass(frozen=True, slots=True)
class Gradient:
    """What is sent at once: one gradient, or a bucket of them.

    Attributes:
        ready: seconds from the start of the step until it can be sent.
        nbytes: its length.
    """

    ready: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank without communication; times in seconds.

    Attributes:
        name: what was trained.
        forward: from the start of the step to the start of backward.
        backward: of backward.
        optimizer: from the end of backward to the end of the step.
        gradients: in the order in which they become ready.
        spread: of computing between steps: its standard deviation as a share of it.
    """

    name: str
    forward: float
    backward: float
    optimizer: float
    gradients: tuple[Gradient, ...]
    spread: float = 0.0

    def __post_init__(self) -> None:
        if min(self.forward, self.backward, self.optimizer, self.spread) < 0:
            raise ValueError(f"step {self.name!r}: times must not be negative")
        ready = [gradient.ready for gradient in self.gradients]
        if ready != sorted(ready):
            raise ValueError(f"step {self.name!r}: gradients must be in the order in which they become ready")
        if ready and not 0 <= ready[0] <= ready[-1] <= self.computed * (1 + 1e-9):
            raise ValueError(f"step {self.name!r}: a gradient is ready before the step or after its backward")

    @property
    def computed(self) -> float:
        """Seconds from the start to the end of backward."""
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        """Of the whole step on one rank."""
        return self.computed + self.optimizer

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)


def bucketed(step: Step, capacity: int) -> Step:
    """Return the step with neighbouring gradients joined into buckets of at most `capacity` bytes.

    A bucket is ready when its last gradient is. A larger gradient is a bucket of its own. 0 joins nothing.
    """
    buckets: list[Gradient] = []
    for gradient in step.gradients:
        if buckets and buckets[-1].nbytes + gradient.nbytes <= capacity:
            buckets[-1] = Gradient(gradient.ready, buckets[-1].nbytes + gradient.nbytes)
        else:
            buckets.append(gradient)
    return replace(step, gradients=tuple(buckets))


def stretched(step: Step, factor: float) -> Step:
    """Return the step of a rank that computes `factor` times as long."""
    gradients = tuple(Gradient(one.ready * factor, one.nbytes) for one in step.gradients)
    return Step(
        step.name, step.forward * factor, step.backward * factor, step.optimizer * factor, gradients, step.spread
    )


def even_step(name: str, compute: float, sizes: Sequence[int]) -> Step:
    """Return a made-up step: a third of `compute` is forward, and backward makes the gradients at an even pace."""
    forward, backward = compute / 3, compute * 2 / 3
    total, done, gradients = sum(sizes), 0, []
    for nbytes in sizes:
        done += nbytes
        gradients.append(Gradient(forward + backward * done / total, nbytes))
    return Step(name, forward, backward, 0.0, tuple(gradients))


def write(step: Step, path: Path) -> None:
    """Write the step as JSON."""
    path.write_text(json.dumps({"format": FORMAT, **asdict(step)}, indent=1) + "\n")


def read(path: Path) -> Step:
    """Return the step in a file that `write` made.

    Raises:
        ValueError: it holds no such step; the message names the file.
    """
    try:
        return _step(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a recorded step ({error!r}). Make one with `bench train --record FILE`."
        ) from error


def _step(found: Any) -> Step:
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']!r} instead of {FORMAT}")
    gradients = tuple(Gradient(float(one["ready"]), int(one["nbytes"])) for one in found["gradients"])
    return Step(
        str(found["name"]), float(found["forward"]), float(found["backward"]), float(found["optimizer"]), gradients,
        float(found.get("spread", 0.0)),
    )  # fmt: skip
