"""Instruments listen to the engine. They never act, and the engine never waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.messages import Kind, Request, Response


class Operation(NamedTuple):
    """One collective that has just run.

    Attributes:
        responses: the tensors that it served, more than one if they were fused.
        nbytes: size of the fused buffer.
        reason: which backend ran it, and why.
        started: `time.perf_counter()` seconds.
        received: rows that this rank got (alltoall only).
    """

    kind: Kind
    responses: Sequence[Response]
    nbytes: int
    reason: str
    started: float
    received: int = 0


class Instrument:
    """Hears nothing. Subclasses override what they care about. All calls come from whoever drives the engine."""

    def heard(self, set_rank: int, requests: Sequence[Request]) -> None:
        """A rank wants `requests`. The coordinator hears of all ranks, the others of themselves."""

    def answered(self, responses: Sequence[Response]) -> None:
        """A Verdict has come: `responses` run next, or are refused."""

    def began(self, responses: Sequence[Response]) -> None:
        """A collective starts that serves `responses`."""

    def activity(self, name: str) -> None:
        """The collective that runs does `name` from here on."""

    def operation(self, operation: Operation) -> None:
        """A collective has run; nobody who waits for it has been told."""

    def ended(self) -> None:
        """The engine stops. What is in flight fails after this."""


class LastReasons(Instrument):
    """Remembers, per kind of operation, why its last backend was chosen."""

    def __init__(self) -> None:
        self.by_kind: dict[str, str] = {}

    def operation(self, operation: Operation) -> None:
        self.by_kind[operation.kind.value] = operation.reason
