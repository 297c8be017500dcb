"""What this rank and who starts the job again tell each other, and signals that ask the job to leave.

Files in one folder and the pipe to this rank's runner carry all of it: nothing listens on a network. Without that
folder every method does nothing. hvdrun does not start jobs again yet; a batch script or a shell loop can.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from hvdlite import arrival, runtime
from hvdlite import config as settings
from hvdlite.elastic.commits import Commits
from hvdlite.observe.log import get_logger

_COMMITTED, _LEAVING, _PREEMPTED, _DONE = b"c", b"l", b"p", b"d"  # marks for hvdrun
_NEWS = "hosts-updated"  # a file with `SECONDS KIND`


class Link:
    """The other side of this rank, if there is one.

    Args:
        folder: where commits are, and news of hosts. "": nobody starts the job again.
        rank: of this process when the training function was called.
        call: which call of a training function this is. A commit holds the newest of each, since a program may
            train several times, and another start makes all its calls again.
    """

    def __init__(self, folder: str, rank: int, call: str) -> None:
        self.is_restartable = bool(folder)
        self._folder, self._rank, self._call = folder, rank, call
        self._commits = Commits(folder)
        self._of_calls: dict[str, Any] = {}
        self.is_asked_to_leave = False

    @classmethod
    def of_this_rank(cls, call: str) -> Link:
        running = runtime.current("hvd.elastic.run()")
        return cls(running.config.elastic_dir, running.rank, call)

    def read_commit(self) -> Any:
        """Return what the newest commit holds of this call, on rank 0 of a job that is started again; else None."""
        if self.is_restartable and not self._rank and (commit := self._commits.read()):
            self._of_calls = commit.content
            if self._call in self._of_calls:
                get_logger().info("goes on from commit %d in %s", commit.number, self._folder)
        return self._of_calls.get(self._call)

    def write_commit(self, content: Any) -> None:
        """Write what a state has saved, on rank 0, so that a job that is started again goes on from it."""
        if self.is_restartable and not self._rank:
            self._of_calls[self._call] = content
            if self._commits.write(self._of_calls):
                self._tell(_COMMITTED)

    def renumbered(self) -> None:
        """hvdlite runs again, and this rank may have another number: rank 0 keeps the commits."""
        before, self._rank = self._rank, runtime.current("hvd.elastic.run()").rank
        if self.is_restartable and before and not self._rank and (commit := self._commits.read()):
            self._of_calls = commit.content

    def news(self) -> tuple[float, int] | None:
        """Return when other hosts were found last, and how they differ (1 removed, 2 added, 3 both), on rank 0."""
        if not self.is_restartable or self._rank:
            return None
        with contextlib.suppress(OSError, ValueError), open(f"{self._folder}/{_NEWS}", encoding="ascii") as file:
            seconds, kind = file.read().split()
            return float(seconds), int(kind)
        return None

    def leave(self) -> NoReturn:
        """End the program, for the job to be started anew, or not if it was asked to leave."""
        self._tell(_PREEMPTED if self.is_asked_to_leave else _LEAVING)
        raise SystemExit(0)

    def done(self) -> None:
        """Tell that this rank's training has come to its end."""
        self._tell(_DONE)

    def _tell(self, mark: bytes) -> None:
        arrival.tell(mark, settings.environment())

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take the signals that announce the end of a job (preemption) as a request to commit and leave.

        That is SIGUSR1; without hvdrun also SIGTERM, once: the second one ends the rank. What the program handles
        itself stays with it.
        """
        ours = [signal.SIGUSR1] if arrival.has_runner(settings.environment()) else [signal.SIGUSR1, signal.SIGTERM]
        if not self.is_restartable or threading.current_thread() is not threading.main_thread():
            ours = []
        ours = [number for number in ours if signal.getsignal(number) is signal.SIG_DFL]

        def note(number: int, frame: FrameType | None) -> None:
            self.is_asked_to_leave = True
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else note)

        for number in ours:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, signal.SIG_DFL)
