"""Which ranks have come to `hvd.init()`, and how long others have waited there for them. Pure: the time is passed in.

MPI's start waits for all ranks and holds Python's lock meanwhile, so that no rank can say itself that others are
missing. Each tells its runner when it comes to init() and when it is through (hvdlite/arrival.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hvdlite.errors import describe_ranks

from .verdict import Record

WARN = 30.0  # seconds; horovodrun's own limit for the start
_GONE = 5.0  # seconds, where a missing rank has ended: it cannot come any more
_NAMED = 5  # missing ranks that are told one by one


@dataclass(frozen=True)
class Late:
    """That ranks have waited too long in init(): in words, whether the job is to end, and a rank that did not come."""

    words: str
    final: bool
    rank: int | None


class Arrivals:
    """Tells when ranks are late.

    Args:
        limit: seconds without an arrival after which the job is to end, if some rank waits. None: it is only told.
    """

    def __init__(self, record: Record, limit: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._record, self._limit, self._clock = record, limit, clock
        self._came: set[int] = set()
        self._through: set[int] = set()
        self._since = 0.0
        self._gone_since: float | None = None
        self._told: list[int] | None = None  # the missing ranks that were told last

    def note(self, rank: int, marks: bytes) -> None:
        """Take notice of what a rank tells: `+` it has come, `-` it is through."""
        if b"+" in marks:
            self._came.add(rank)
            self._since = self._clock()
        if b"-" in marks:
            self._through.add(rank)

    def late(self) -> Late | None:
        """Return what is to be told now, once for each set of missing ranks."""
        ends, now = self._record.ends, self._clock()
        waiting = [rank for rank in sorted(self._came - self._through) if rank not in ends]
        missing = [rank for rank in range(self._record.size) if rank not in self._came]
        gone = [rank for rank in missing if rank in ends]
        if not waiting:
            return None
        if gone and self._gone_since is None:
            self._gone_since = now
        if gone and now >= max(self._since, self._gone_since or 0.0) + _GONE:
            return Late(self._words_for(missing, waiting, ", which every rank has to call"), True, gone[0])
        if now < self._since + (WARN if self._limit is None else self._limit) or self._told == missing:
            return None
        self._told = missing
        words = self._words_for(missing, waiting, "")
        return Late(words, self._limit is not None, missing[0] if missing else None)

    def _words_for(self, missing: list[int], waiting: list[int], why: str) -> str:
        size, seconds = self._record.size, f"{self._clock() - self._since:.0f} s"
        if not missing:
            several = len(set(self._record.hosts.values())) > 1
            hint = ": name the network that connects the hosts with --network-interfaces" if several else ""
            came = f"{describe_ranks(waiting)} of {size} came to hvd.init() and are not through after {seconds}"
            return f"{came}: MPI does not connect them{hint}"
        states = [self._state(rank) for rank in missing[:_NAMED]]
        states += [f"and {len(missing) - _NAMED} more"] if len(missing) > _NAMED else []
        verb, waits = ("has" if len(missing) == 1 else "have"), ("waits" if len(waiting) == 1 else "wait")
        return (
            f"{describe_ranks(missing)} of {size} {verb} not come to hvd.init(){why}, "
            f"and {describe_ranks(waiting)} {waits} there for {seconds}: {'; '.join(states)}"
        )

    def _state(self, rank: int) -> str:
        record = self._record
        if end := record.ends.get(rank):
            how = f"ended with exit code {end.code}" if end.code >= 0 else f"was killed by signal {-end.code}"
            return f"rank {rank} on {end.host} {how} without it"
        if rank in record.hosts:
            return f"rank {rank} still runs on {record.hosts[rank]}, process {record.processes[rank]}"
        return f"rank {rank} was not started"
