"""The last resort: operations that neither end nor are explained by the stall watch, as some rank does not answer.

The stall watch needs an engine on every rank that listens. Of a process that is stopped, or whose host is out of reach,
nothing comes; and who is in the middle of a transfer with it cannot look around. So a thread of its own does, on
every rank, for this rank alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

_PART = 4  # looks within the shortest limit


class UnderWay(NamedTuple):
    """An engine that has something in flight.

    Attributes:
        what: the oldest operation, for a message.
        progress: changes whenever an operation starts or ends.
        explained: when the stall watch was last seen at work here, monotonic seconds.
    """

    what: str
    progress: tuple[float, float]
    explained: float


class Watched(Protocol):
    """An engine."""

    def under_way(self) -> UnderWay | None:
        """Return what is in flight, None if nothing is. From any thread."""


class _Seen(NamedTuple):
    progress: tuple[float, float]
    since: float
    is_told: bool


class Watchdog:
    """Looks at the engines of this rank. `start` makes it a thread that does so until `stop`.

    Args:
        warning: seconds without progress after which `warn` is called, once for each operation. 0: never look.
        shutdown: seconds without progress after which `end` is called. 0: never.
        engines: returns those that there are now.
        warn, end: take what has happened, as a sentence without its end.
    """

    def __init__(
        self,
        warning: float,
        shutdown: float,
        engines: Callable[[], Iterable[Watched]],
        warn: Callable[[str], None],
        end: Callable[[str], None],
    ) -> None:
        self._warning, self._shutdown, self._engines = warning, shutdown, engines
        self._warn, self._end = warn, end
        self._seen: dict[Watched, _Seen] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main, name="hvdlite watchdog", daemon=True)

    def start(self) -> None:
        if self._warning:
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for that."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self, now: float) -> None:
        """Look once.

        Args:
            now: monotonic seconds.
        """
        before, self._seen = self._seen, {}
        for engine in self._engines():
            found = engine.under_way()
            if found is None:
                continue
            seen = before.get(engine)
            if seen is None or seen.progress != found.progress:
                seen = _Seen(found.progress, now, False)
            waited = now - max(seen.since, found.explained)
            text = f"{found.what} has been under way for {now - seen.since:.0f} s, and some rank does not answer"
            if self._shutdown and waited > self._shutdown:
                self._end(text)
            elif waited > self._warning and not seen.is_told:
                self._warn(text)
                seen = seen._replace(is_told=True)
            self._seen[engine] = seen

    def _main(self) -> None:
        pause = min(limit for limit in (self._warning, self._shutdown) if limit) / _PART
        while not self._over.wait(pause):
            self.look(time.monotonic())
