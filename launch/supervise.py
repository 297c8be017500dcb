"""Running a job under hvdrun's eyes: starts the launcher, shows what ranks write, and tells at the end how it went.

What to show is decided in `screen`, what to say at the end in `verdict`; here it is done.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from . import process
from .arrivals import Arrivals
from .feed import Feed
from .frames import Frame, FrameReader
from .screen import Piece, Screen, Style
from .silence import Silence
from .verdict import Record, judge, last_words

_LOOK = 0.1  # seconds between two looks at whether the launcher has ended
_HELD = 2.0  # seconds for which the launcher's own words wait for a rank's failure that would explain them
_ALONE = 1.0  # seconds for a launcher to end what it can, when a host is out of reach: it would wait for that one
_REST = 1.0  # seconds for what is still in the pipes when the launcher has ended
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def runner_command(output: str, ranks: int) -> list[str]:
    """Return what stands in front of the program: it runs it, and reports to `supervise`."""
    args = ["--files", output, "--width", str(len(str(ranks - 1)))] if output else []
    columns = _columns(1)
    if columns:
        args += ["--columns", str(columns)]
    return [sys.executable, "-I", "-S", f"{os.path.dirname(os.path.abspath(__file__))}/runner.py", *args, "--"]


def supervise(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    ranks: int,
    label: bool,
    stamped: bool,
    verbose: bool,
    patience: float | None = None,
    host_patience: float = 0.0,
) -> int:
    """Run a launcher whose ranks report, and return the exit code of the job.

    Args:
        verbose: show also what the launcher says about a failure that a rank has explained.
        patience: seconds for which ranks in `hvd.init()` wait for the others before the job ends. None: as long as
            it takes, and it is told.
        host_patience: seconds for which a host may be out of reach before the job ends. 0: as long as it is.
    """
    columns = {stream: found for stream, fd in (("o", 1), ("e", 2)) if (found := _columns(fd))}
    record = Record(ranks)
    screen = Screen(Style(label, stamped, columns), record.listen)
    silence = Silence(record, host_patience, process.is_this_machine)
    job = _Job(record, screen, Arrivals(record, patience), silence, verbose)
    received = job.received
    with process.started(argv, environ, received) as (child, end):
        assert child.stdin is not None
        job.feed = Feed(child.stdin.fileno())
        job.feed.start()
        job.read(child, end)
        code = child.wait()
    ending = next((number for number in received if number in _ENDING), 0)
    verdict = judge(record, os.path.basename(argv[0]), process.as_in_a_shell(code), ending)
    if verdict.launcher_knows:
        job.let_go()
    job.write(job.screen.close())
    if verdict.words:
        tail = job.screen.tail(verdict.tail_of) if verdict.tail_of is not None else []
        job.write([("e", last_words(verdict.words, tail, verdict.tail_of).encode())])
    return verdict.code


def _columns(fd: int) -> int:
    """Return the width of a terminal, 0 if it is none."""
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 0


@dataclass
class _Job:
    record: Record
    screen: Screen
    arrivals: Arrivals
    silence: Silence
    verbose: bool
    received: list[int] = field(default_factory=list)  # signals
    stuck: set[str] = field(default_factory=set)  # streams that nobody reads, and hvdrun is to end
    feed: Feed | None = None
    held: list[tuple[float, Piece]] = field(default_factory=list)  # the launcher's own words, and since when
    lost: set[str] = field(default_factory=set)  # streams that could not be written

    def read(self, child: subprocess.Popen[bytes], end: Callable[[], None]) -> None:
        """Read what the launcher forwards until it has ended. `end()` ends it."""
        assert child.stdout is not None and child.stderr is not None
        readers = {"o": FrameReader(), "e": FrameReader()}
        until, looked = float("inf"), time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ, "o")
            selector.register(child.stderr, selectors.EVENT_READ, "e")
            while selector.get_map() and time.monotonic() < until:
                for key, _ in selector.select(_LOOK):
                    data = os.read(key.fd, 2**16)
                    for found in readers[key.data].feed(data):
                        self._take(found, key.data)
                    if not data:
                        selector.unregister(key.fileobj)
                self._let_go_of_the_old()
                self.silence.listened(time.monotonic() - looked)
                looked = time.monotonic()
                self._look_for_the_late(end)
                if self._misses_a_host():
                    process.stop(child, _ALONE)
                if until == float("inf") and child.poll() is not None:
                    until = time.monotonic() + _REST  # others may hold the pipes for longer
        self._let_go_of_the_old()

    def _take(self, found: Frame | bytes, stream: str) -> None:
        if isinstance(found, Frame):
            self.silence.heard(found.rank)
        if isinstance(found, bytes):
            self.held.append((time.monotonic(), (stream, found)))
            self.record.overhear(found)
        elif found.kind in ("o", "e"):
            self.write(self.screen.feed(found.rank, found.kind, found.data))
        elif found.kind == "i":
            self.arrivals.note(found.rank, found.data)
        elif found.kind == "a" and self.feed:
            self.feed.taken(int(found.data))
        elif found.kind == "t":
            self.screen.keep(found.rank, found.data)
        else:
            self.record.note(found.rank, found.kind, found.data)

    def _look_for_the_late(self, end: Callable[[], None]) -> None:
        late = None if self.record.late else self.arrivals.late()
        if late and late.final:
            self.record.late = late.words, late.rank
            end()
        elif late:
            words = f"hvdrun: {late.words}. The job waits on; --start-timeout S would end it after S seconds\n"
            self.write(self.screen.say("e", words.encode()))

    def _misses_a_host(self) -> bool:
        late = None if self.record.late else self.silence.late()
        if late:
            self.record.late = late.words, late.rank
        return late is not None

    def _let_go_of_the_old(self) -> None:
        """Show what the launcher has said, unless it may belong to a failure: that is told better at the end."""
        if self.verbose or (self.record.first is None and self.held and time.monotonic() > self.held[0][0] + _HELD):
            self.let_go()

    def let_go(self) -> None:
        for _, (stream, text) in self.held:
            self.write(self.screen.say(stream, text))
        self.held.clear()

    def write(self, pieces: Sequence[Piece]) -> None:
        for stream, text in pieces:
            rest, fd = text, 1 if stream == "o" else 2
            try:
                while rest and stream not in self.stuck:
                    self._wait_for_room(fd)
                    with contextlib.suppress(BlockingIOError):  # somebody made it so that shares it with us
                        rest = rest[os.write(fd, rest[: select.PIPE_BUF]) :]
            except TimeoutError:
                self.stuck.add(stream)
            except OSError as error:  # nobody reads it, it is closed, or its disk is full; the job goes on
                self._note_loss(stream, error)

    def _wait_for_room(self, fd: int) -> None:
        """Wait until a pipe takes a piece. Raises TimeoutError if it does not, and hvdrun was told to end."""
        until = float("inf")
        while not select.select([], [fd], [], _LOOK)[1]:
            if until == float("inf") and any(number in _ENDING for number in self.received):
                until = time.monotonic() + _REST
            if time.monotonic() > until:
                raise TimeoutError

    def _note_loss(self, stream: str, error: OSError) -> None:
        """Say once that what ranks write does not arrive. Nothing where the reader has had enough, as `head` has."""
        if stream in self.lost:
            return
        self.lost.add(stream)
        if not isinstance(error, BrokenPipeError):
            what = "standard output" if stream == "o" else "standard error"
            words = f"hvdrun: cannot write to {what}, so some of it is lost, and the job goes on: {error.strerror}\n"
            self.write([("e", words.encode())])
