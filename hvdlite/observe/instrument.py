"""Instruments listen to the engine. They never act, and the engine never waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.messages import Kind, Response


class Operation(NamedTuple):
    """One collective that has just run.

    Attributes:
        responses: the tensors that it served, more than one if they were fused.
        nbytes: size of the fused buffer.
        reason: which backend ran it, and why.
        started: `time.perf_counter()` seconds.
    """

    kind: Kind
    responses: Sequence[Response]
    nbytes: int
    reason: str
    started: float


class Instrument:
    """Hears nothing. Subclasses override what they care about."""

    def operation(self, operation: Operation) -> None:
        """A collective has run, on the engine thread."""


class LastReasons(Instrument):
    """Remembers, per kind of operation, why its last backend was chosen."""

    def __init__(self) -> None:
        self.by_kind: dict[str, str] = {}

    def operation(self, operation: Operation) -> None:
        self.by_kind[operation.kind.value] = operation.reason
