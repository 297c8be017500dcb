"""What ran, how long it took, and how much of that the program did not notice.

A collective is *hidden* while no caller waits for an operation: then the program computes, or does something
else. What is not hidden is *exposed*. Each engine has an ear here; all share one clock of waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from hvdlite.messages import Response
from hvdlite.observe.instrument import Instrument, Operation, WaitClock


@dataclass(slots=True)
class Total:
    """What ran of one kind of operation.

    Attributes:
        batches: collectives.
        tensors: served by them.
        nbytes: of the fused buffers.
        seconds: that the collectives took.
        exposed: of these seconds, those during which a caller waited.
    """

    batches: int = 0
    tensors: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0

    def add(self, other: Total) -> None:
        self.batches += other.batches
        self.tensors += other.tensors
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.exposed += other.exposed

    def as_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "hidden_seconds": max(0.0, self.seconds - self.exposed),
        }


class Metrics:
    """The sums of one process, over all its process sets."""

    def __init__(self) -> None:
        self.waits = WaitClock()
        self._started = perf_counter()
        self._ears: list[_Ear] = []
        self._past: dict[str, Total] = {}  # of engines that have ended

    def ear(self, rest: Instrument) -> Instrument:
        """Return the ear for one engine. It passes on to `rest` what has run."""
        ear = _Ear(self.waits, rest, self._fold)
        self._ears.append(ear)
        return ear

    def snapshot(self) -> dict[str, Any]:
        """Return the sums since the start: see `hvd.metrics()`."""
        now = perf_counter()
        by_kind: dict[str, Total] = {}
        for totals in [self._past, *(ear.totals for ear in list(self._ears))]:
            _add(by_kind, totals)
        busy = sum(total.seconds for total in by_kind.values())
        exposed = sum(total.exposed for total in by_kind.values())
        return {
            "seconds": now - self._started,
            "communication_seconds": busy,
            "hidden_share": max(0.0, 1.0 - exposed / busy) if busy else 1.0,
            "waiting_seconds": self.waits.seconds(now),
            "waits": self.waits.count,
            "operations": {kind: by_kind[kind].as_dict() for kind in sorted(by_kind)},
        }

    def last_words(self) -> dict[str, Any]:
        """Return what rank 0 is to know of this rank at the end."""
        return self.snapshot()

    def _fold(self, ear: _Ear) -> None:
        """Keep the sums of an engine that has ended, and not the engine's ear: sets may come and go."""
        if ear in self._ears:
            _add(self._past, ear.totals)
            self._ears.remove(ear)


class _Ear(Instrument):
    """Listens to one engine: driven by one thread at a time, so the sums need no lock."""

    def __init__(self, waits: WaitClock, rest: Instrument, on_ended: Any) -> None:
        self.totals: dict[str, Total] = {}
        self._waits, self._rest, self._on_ended = waits, rest, on_ended
        self._waited = 0.0

    def began(self, responses: Sequence[Response]) -> None:
        self._waited = self._waits.seconds(perf_counter())

    def operation(self, operation: Operation) -> None:
        now = perf_counter()
        kind, responses, nbytes, _, started, _ = operation
        total = self.totals.get(kind._value_)  # an Enum's `value` costs as much as all the rest of this
        if total is None:
            total = self.totals[kind._value_] = Total()
        took, exposed = now - started, self._waits.seconds(now) - self._waited
        total.batches += 1
        total.tensors += len(responses)
        total.nbytes += nbytes
        total.seconds += took
        total.exposed += exposed if exposed < took else took
        self._rest.operation(operation)

    def ended(self) -> None:
        self._rest.ended()
        self._on_ended(self)


def summary(by_rank: Mapping[int, Mapping[str, Any]]) -> str:
    """Return one line about a whole job: what was moved, what it cost, and who was waited for.

    Args:
        by_rank: the snapshot of each rank; the line's sums are those of the first.
    """
    first = by_rank[min(by_rank)]
    operations = first["operations"]
    moved = {kind: total for kind, total in operations.items() if total["bytes"]}
    tensors, batches = (sum(total[what] for total in moved.values()) for what in ("tensors", "batches"))
    busy = first["communication_seconds"]
    parts = [
        f"{_count(len(by_rank), 'rank')}, {first['seconds']:.1f} s",
        f"{_count(tensors, 'tensor')}, {_bytes(sum(total['bytes'] for total in moved.values()))}, "
        f"in {_count(batches, 'collective')}",
        f"communication {_share(busy, first['seconds'])}, {100 * first['hidden_share']:.0f} % of it hidden",
    ]
    waited = {rank: one["waiting_seconds"] for rank, one in by_rank.items()}
    least, most = min(waited, key=lambda rank: waited[rank]), max(waited, key=lambda rank: waited[rank])
    if least == most:
        parts.append(f"callers waited {_share(waited[most], first['seconds'])}")
    else:
        lost = _share(waited[most] - waited[least], first["seconds"])
        parts.append(
            f"callers waited {_share(waited[most], first['seconds'])} on rank {most} and "
            f"{_share(waited[least], first['seconds'])} on rank {least}, so rank {least} was the slowest and "
            f"cost the others up to {lost}"
        )
    return "hvdlite summary: " + "; ".join(parts) + "."


def _add(into: dict[str, Total], totals: Mapping[str, Total]) -> None:
    for kind, total in list(totals.items()):
        into.setdefault(kind, Total()).add(total)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _share(seconds: float, whole: float) -> str:
    return f"{seconds:.2f} s ({100 * seconds / whole if whole else 0.0:.1f} %)"


def _bytes(n: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.4g} GB"
