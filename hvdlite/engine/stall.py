"""The stall watch: who does not come, to what, since when, and what is it doing instead?

Rank 0 of a set finds tensors that wait too long, asks every rank what it has
submitted, finished last and is doing now, and logs one warning per tensor. A rank
whose program is stuck still answers, because its engine thread does.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdlite.comm.base import Communicator
from hvdlite.config import Config
from hvdlite.engine.inbox import Inbox
from hvdlite.errors import describe_ranks
from hvdlite.messages import Refusal, Request, Tag, decode_json, encode_json
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.ledger import Entry

_ANSWER_TIME = 2.0  # seconds; a rank that is slower is reported as silent


@dataclass(slots=True)
class _Inquiry:
    """A question that is out."""

    names: list[str]
    asked: float
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)


class StallWatch:
    """One rank's part of the watch. Engine thread only.

    Args:
        coordinator: on set rank 0, else None.
        last_finished: names the operation that this rank finished last.
        warn: takes the text of a warning.
    """

    def __init__(
        self,
        comm: Communicator,
        config: Config,
        coordinator: Coordinator | None,
        inbox: Inbox,
        last_finished: Callable[[], str],
        warn: Callable[[str], None],
    ) -> None:
        self._comm, self._config, self._coordinator = comm, config, coordinator
        self._inbox, self._last_finished, self._warn = inbox, last_finished, warn
        self._warned: dict[str, float] = {}
        self._inquiry: _Inquiry | None = None
        self.at_work = -math.inf  # when this rank last asked, or was asked; monotonic seconds

    def check(self, now: float) -> None:
        """Look for tensors that wait too long. Called now and then by the engine; cheap.

        Args:
            now: seconds of the coordinator's clock.
        """
        if self._coordinator is None or not self._config.stall_warning:
            return
        waiting = self._coordinator.ledger.waiting
        if self._inquiry is not None:
            if len(self._inquiry.reports) == self._comm.size or now - self._inquiry.asked > _ANSWER_TIME:
                self._conclude(now)
            return
        self._warned = {name: at for name, at in self._warned.items() if name in waiting}
        names = [name for name, entry in waiting.items() if self._is_due(name, entry, now)]
        if names:
            self._ask(names, now)
        self._give_up(now)

    def hear(self, source: int, tag: Tag, value: Any) -> None:
        """Take in a query or a report of another rank."""
        if tag is Tag.STALL_QUERY:
            self.at_work = time.monotonic()
            self._comm.post(source, encode_json(Tag.STALL_REPORT, self._report(value)))
        elif self._inquiry is not None:
            self._inquiry.reports[source] = value

    def _is_due(self, name: str, entry: Entry, now: float) -> bool:
        return now - self._warned.get(name, entry.since) >= self._config.stall_warning

    def _ask(self, names: list[str], now: float) -> None:
        self._inquiry = _Inquiry(names, now)
        self.at_work = time.monotonic()
        self._inquiry.reports[0] = decode_json(encode_json(Tag.STALL_REPORT, self._report(names)))
        for rank in range(1, self._comm.size):
            self._comm.post(rank, encode_json(Tag.STALL_QUERY, names))

    def _report(self, names: list[str]) -> dict[str, Any]:
        found = {name: self._inbox.get(name) for name in names}
        return {
            "last": self._last_finished(),
            "sites": {name: s.where for name, s in found.items() if s is not None},
            "now": _main_thread_position(),
        }

    def _conclude(self, now: float) -> None:
        assert self._inquiry is not None and self._coordinator is not None
        inquiry, self._inquiry = self._inquiry, None
        for name in inquiry.names:
            entry = self._coordinator.ledger.waiting.get(name)
            if entry is not None:  # else it came meanwhile
                self._warned[name] = now
                self._warn(self._describe(name, entry, inquiry, now))

    def _describe(self, name: str, entry: Entry, inquiry: _Inquiry, now: float) -> str:
        assert self._coordinator is not None
        members = self._coordinator.members
        request: Request = next(iter(entry.requests.values()))
        missing = self._coordinator.ledger.missing(name)
        lines = [
            f"stalled for {now - entry.since:.0f} s: {request.kind.value} of tensor {name!r}, "
            f"{request.dtype}{list(request.shape)}, waits for {describe_ranks(members[r] for r in missing)}."
        ]
        for rank in range(self._comm.size):
            report = inquiry.reports.get(rank)
            if report is None:
                lines.append(f"  rank {members[rank]}: does not answer (its engine is busy or its process is stopped)")
                continue
            did = "has not submitted it" if rank in missing else f"submitted it at {report['sites'].get(name, '?')}"
            lines.append(f"  rank {members[rank]}: {did}; finished last: {report['last']}; is now at {report['now']}")
        lines.append("  One or more ranks took another branch, or do more work than the others.")
        return "\n".join(lines)

    def _give_up(self, now: float) -> None:
        assert self._coordinator is not None
        limit = self._config.stall_shutdown
        if not limit:
            return
        for name, entry in list(self._coordinator.ledger.waiting.items()):
            if now - entry.since >= limit:
                members = self._coordinator.members
                missing = describe_ranks(members[r] for r in self._coordinator.ledger.missing(name))
                waited = f"{now - entry.since:.0f} s for {missing}"
                text = f"tensor {name!r} waited {waited}, over HVDLITE_STALL_SHUTDOWN={limit:g}"
                self._coordinator.refuse(name, Refusal("stall", name, f"{text}, so hvdlite has been shut down."))
                self._coordinator.leave(0, f"gave up: {text}")


def _main_thread_position() -> str:
    """Return `train.py:88 in evaluate` for this process' main thread, outside hvdlite and libraries where possible."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    first = frame
    while frame is not None and _is_library(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    frame = frame or first
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(filename: str, module: str) -> bool:
    return module.partition(".")[0] == "hvdlite" or "site-packages" in filename or module == "threading"
