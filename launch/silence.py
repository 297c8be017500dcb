"""From which hosts nothing is heard any more. Pure: the time is passed in.

A host that loses its power or its network says no goodbye. TCP waits a quarter of an hour for it, and so do the
launcher, and ranks in the middle of a transfer. Each rank's runner gives a sign of life every second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdlite.errors import describe_ranks

from .verdict import Record

LIMIT = 7  # seconds; with the second that the launcher then gets, a job ends within 10
_MOST = 0.5  # seconds that one look may count for: hvdrun itself may have been stopped, or waited for its reader


@dataclass(frozen=True)
class Silent:
    """That hosts are out of reach, in words, and the ranks there."""

    words: str
    ranks: Sequence[int]


class Silence:
    """Tells when a host is out of reach.

    Args:
        limit: seconds. 0: it is never told.
        is_here: whether a host is the one of hvdrun, to which no network leads.
    """

    def __init__(self, record: Record, limit: float, is_here: Callable[[str], bool]) -> None:
        self._record, self._limit, self._is_here = record, limit, is_here
        self._listened = 0.0  # seconds
        self._heard: dict[int, float] = {}

    def heard(self, rank: int) -> None:
        """Take notice of anything that a rank tells."""
        self._heard[rank] = self._listened

    def listened(self, seconds: float) -> None:
        """Take notice that so much time has passed, with everything read that had come by then."""
        self._listened += min(seconds, _MOST)

    def silent(self) -> Silent | None:
        """Return what is to be told now. All ranks of a host have to be silent: one alone may be in trouble itself."""
        ranks: dict[str, list[int]] = {}
        for rank, host in self._record.hosts.items():
            if rank not in self._record.ends and not self._is_here(host):
                ranks.setdefault(host, []).append(rank)
        spoke = {host: max(self._heard.get(rank, 0.0) for rank in found) for host, found in ranks.items()}
        silent = sorted(host for host, last in spoke.items() if self._listened - last > self._limit)
        if not silent or not self._limit:
            return None
        lost = sorted(rank for host in silent for rank in ranks[host])
        waited = self._listened - max(spoke[host] for host in silent)
        return Silent(
            f"nothing was heard from {', '.join(silent)} with {describe_ranks(lost)} of {self._record.size} for "
            f"{waited:.0f} s: it is down, or the network to it is cut (--host-timeout)",
            lost,
        )
