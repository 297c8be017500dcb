"""A job of changing size: its ranks are started, watched, and started again. What is decided: history.py, roster.py."""

from __future__ import annotations

import signal
import time

from .. import process, supervise
from ..guard import ENDING
from ..hosts import Host
from ..output import Output
from ..start import Start
from ..verdict import Record, last_words
from .folder import PREFIX, Folder
from .history import History, culprits
from .room import Frame, NoRoom, Room, how_long
from .roster import REMOVED, Placement, hosts_of, told


def preview(frame: Frame) -> Start:
    """Return how the first start would be, with the hosts that there are now. Raises LaunchError if too few."""
    folder = frame.terms.folder or f"{process.absolute('.')}/{PREFIX}XXXX"
    return frame.start_on(Room(frame, (), lambda words: None).now(), folder)


def run(frame: Frame, manner: supervise.Manner) -> int:
    """Run the job to its end, and return its exit code."""
    received: list[int] = []
    output = Output(received)
    with process.signals_noted(received, lambda: None):
        folder, code = Folder(frame.terms.folder), 1
        try:
            with Room(frame, received, output.line) as room:
                code = Driver(frame, manner, folder, room, received, output).run()
                return code
        finally:
            if kept := folder.close(code == 0):
                output.line(kept)


class Driver:
    """The loop: see `run`."""

    def __init__(
        self,
        frame: Frame,
        manner: supervise.Manner,
        folder: Folder,
        room: Room,
        received: list[int],
        output: Output,
    ) -> None:
        self._frame, self._manner, self._folder, self._room = frame, manner, folder, room
        self._received, self._output = received, output
        self._history = History(frame.terms.resets)

    def run(self) -> int:
        reason, history = "", self._history
        while True:
            placement = self._room.wait()
            if isinstance(placement, NoRoom):
                self._output.line(f"{placement.words}{f', after: {reason}' if reason else ''}")
                return placement.code
            history.starts += 1
            self._output.line(self._announcement(placement, reason))
            ended = self._start(placement)
            ending = next((number for number in self._received if number in ENDING), 0)
            follows = history.after(ended.record, ended.verdict, ending, signal.SIGUSR1 in self._received)
            if follows.code is not None:
                if follows.words:
                    self._output.say(last_words(follows.words, ended.tail, ended.verdict.tail_of))
                elif history.starts > 1:
                    self._output.line(f"done, in {history.starts} starts")
                return follows.code
            reason = follows.words
            for name, seconds in self._blame(ended.record, placement).items():
                reason += f"; {name} is set aside{how_long(seconds)}"

    def _announcement(self, placement: Placement, reason: str) -> str:
        number, starts, path = self._folder.newest(), self._history.starts, self._folder.path
        where = f"start {starts} on {told(placement, self._frame.is_alone)}"
        if starts == 1:
            return f"{where}; " + (f"goes on from commit {number} in {path}" if number else f"commits go to {path}")
        return f"{where}: {reason}; " + (f"goes on from commit {number}" if number else "begins anew: nothing to go on")

    def _start(self, placement: Placement) -> supervise.Ended:
        frame, terms = self._frame, self._frame.terms
        most = max(terms.most or 0, terms.first, placement.ranks)  # for names of equal length
        runner = supervise.runner_command(frame.job.output, most, append=self._history.starts > 1)
        start = frame.start_on(placement, self._folder.path, runner)
        self._folder.withdraw()
        news = News(self._room, self._folder, placement, terms.timeout)
        return supervise.watch(
            start.command, start.environ, placement.ranks, self._manner, self._received, self._output,
            reads_input=False, look=news.look if self._history.may_reset else news.look_only,
        )  # fmt: skip

    def _blame(self, record: Record, placement: Placement) -> dict[str, float]:
        """Set aside the hosts of who failed, and return for how long."""
        if self._frame.is_alone:
            return {}
        return self._room.set_aside(hosts_of(culprits(record), placement, record.hosts))


class News:
    """Lets the ranks know, while they run, that there are other hosts.

    Args:
        patience: seconds for ranks to leave when a host is gone, from the last commit on.
    """

    def __init__(self, room: Room, folder: Folder, placement: Placement, patience: float) -> None:
        self._room, self._folder, self._placement, self._patience = room, folder, placement, patience
        self._told: tuple[int, tuple[Host, ...]] | None = None
        self._commit: int | None = None
        self._until = float("inf")

    def look_only(self, record: Record) -> supervise.Look:
        """Tell the ranks nothing: they are not to leave."""
        return supervise.Look(self._room.notes())

    def look(self, record: Record) -> supervise.Look:
        kind = self._room.change(self._placement)
        news = (kind, self._room.found) if kind else None
        if news != self._told:
            self._told = news
            if news:
                self._folder.announce(time.time(), kind)
            else:
                self._folder.withdraw()
        return supervise.Look(self._room.notes(), self._why_to_end(kind))

    def _why_to_end(self, kind: int) -> str:
        """Ranks on a host that is out of reach may wait for ever, and would never hear of it."""
        now = time.monotonic()
        if not kind & REMOVED:
            self._until = float("inf")
        elif self._until == float("inf") or self._folder.newest() != self._commit:
            self._commit, self._until = self._folder.newest(), now + self._patience
        elif now >= self._until:
            gone = ", ".join(self._room.gone(self._placement))
            return f"{gone} is gone, and the ranks have not left or committed for {self._patience:g} s"
        return ""
