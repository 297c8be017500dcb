"""Memory that the ranks of one host share, with flags to wait on. Contract only.

`comm/segment.py` has the implementation for processes and threads.
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray


class SharedSegment(Protocol):
    """One block of bytes per rank, visible to all, and a barrier among the ranks."""

    rank: int
    size: int

    def block(self, rank: int) -> NDArray[Any]:
        """Return the block of `rank` as a flat uint8 array, 4096-byte aligned. No copy."""

    def barrier(self) -> None:
        """Return once every rank has entered; what any rank wrote before is then visible. Collective.

        Spins for some tens of microseconds, then sleeps in the kernel.
        """

    def publish(self, slot: int, value: int) -> None:
        """Set this rank's flag number `slot` (0 to 7) and wake who waits for it.

        What this rank wrote before is visible to every rank that sees the flag. A flag only grows; it starts at 0.
        """

    def put(self, slot: int, value: int) -> None:
        """`publish` without waking anyone: for those who wait by other means."""

    def peek(self, rank: int, slot: int) -> int:
        """Return the flag `slot` of `rank` as it is now. What that rank wrote before is then visible."""

    def all_show(self, slot: int, value: int) -> bool:
        """Return whether the flag `slot` of every rank is `value` now. What they wrote before is then visible."""

    def glimpse(self, rank: int, slot: int, value: int) -> bool:
        """Return whether the flag `slot` of `rank` is at least `value`, after a short spin where that helps."""

    def await_rank(self, rank: int, slot: int, value: int) -> None:
        """Return once the flag `slot` of `rank` is at least `value`. Spins, then sleeps, like `barrier`."""

    def await_all(self, slot: int, value: int) -> None:
        """Return once the flag `slot` of every rank, this one included, is at least `value`."""

    def close(self) -> None:
        """Drop the mapping. Nothing stays behind in the file system, even after kill -9."""
