"""Instruments listen to the engine. They never act, and the engine never waits for them."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Sequence
from time import perf_counter
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


class WaitClock:
    """How long callers have waited for operations: the time during which at least one did. Any thread may call.

    Attributes:
        on_waited: told from when to when, in `time.perf_counter()` seconds, after nobody waits any more.
    """

    def __init__(self) -> None:
        self.on_waited: Callable[[float, float], None] | None = None
        self.count = 0
        self._lock = _thread.allocate_lock()
        self._waiting = 0  # callers
        self._state = (0.0, -1.0)  # seconds that are over; since when somebody waits. One value, read without the lock

    def begin(self) -> None:
        """A caller waits from here on."""
        with self._lock:
            if not self._waiting:
                self._state = (self._state[0], perf_counter())
            self._waiting += 1

    def end(self, goes_on: bool = False) -> None:
        """It does not wait any more; or, where it `goes_on`, will `begin` once more for the same operation."""
        with self._lock:
            self._waiting -= 1
            if self._waiting:
                return
            total, since = self._state
            now = perf_counter()
            self._state = (total + now - since, -1.0)
            self.count += not goes_on
        if self.on_waited is not None:
            self.on_waited(since, now)

    def seconds(self, now: float) -> float:
        """Return the time that was waited until `now`, a moment that has just been."""
        total, since = self._state
        return total if since < 0 else total + max(0.0, now - since)


class Both(Instrument):
    """Passes on to two others what has run, and the end."""

    def __init__(self, first: Instrument, second: Instrument) -> None:
        self._first, self._second = first, second

    def operation(self, operation: Operation) -> None:
        self._first.operation(operation)
        self._second.operation(operation)

    def ended(self) -> None:
        self._first.ended()
        self._second.ended()


class LastReasons(Instrument):
    """Remembers, per kind of operation, why its last backend was chosen."""

    def __init__(self) -> None:
        self.by_kind: dict[str, str] = {}

    def operation(self, operation: Operation) -> None:
        self.by_kind[operation.kind._value_] = operation.reason
