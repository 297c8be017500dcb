"""Running a job under hvdrun's eyes: starts the launcher, shows what ranks write, and tells at the end how it went.

What to show is decided in `screen`, what to say at the end in `verdict`; here it is done.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from . import process
from .arrivals import Arrivals
from .feed import Feed
from .frames import Frame, FrameReader
from .guard import ENDING
from .output import Output
from .screen import Piece, Screen, Style
from .silence import Silence
from .verdict import Record, Verdict, judge, last_words

_LOOK = 0.1  # seconds between two looks at whether the launcher has ended
_HELD = 2.0  # seconds for which the launcher's own words wait for a rank's failure that would explain them
_ALONE = 1.0  # seconds for a launcher to end what it can, when a host is out of reach: it would wait for that one
_REST = 1.0  # seconds for what is still in the pipes when the launcher has ended


def runner_command(output: str, ranks: int, append: bool = False) -> list[str]:
    """Return what stands in front of the program: it runs it, and reports to `watch`.

    Args:
        output: a folder for files with what each of `ranks` writes, "" for none.
        append: the files are gone on with.
    """
    args = ["--files", output, "--width", str(len(str(ranks - 1)))] if output else []
    if output and append:
        args += ["--append", "1"]
    columns = _columns(1)
    if columns:
        args += ["--columns", str(columns)]
    return [sys.executable, "-I", "-S", f"{os.path.dirname(os.path.abspath(__file__))}/runner.py", *args, "--"]


@dataclass(frozen=True)
class Manner:
    """How a job is shown and watched.

    Attributes:
        label: the rank in front of each line; None: where there are several ranks.
        stamped: the time in front of each line.
        verbose: show also what the launcher says about a failure that a rank has explained.
        patience: seconds for which ranks in `hvd.init()` wait for the others before the job ends. None: as long as
            it takes, and it is told.
        host_patience: seconds for which a host may be out of reach before the job ends. 0: as long as it is.
    """

    label: bool | None = None
    stamped: bool = False
    verbose: bool = False
    patience: float | None = None
    host_patience: float = 0.0


@dataclass(frozen=True)
class Ended:
    """How a job has ended, what the ranks have told, and the last lines of the rank that failed."""

    verdict: Verdict
    record: Record
    tail: list[bytes]

    @property
    def last_words(self) -> str:
        return last_words(self.verdict.words, self.tail, self.verdict.tail_of) if self.verdict.words else ""


@dataclass(frozen=True)
class Look:
    """What somebody who looks at a job has to say, and why it is to end, "" if it is not."""

    lines: Sequence[str] = ()
    end: str = ""


def supervise(argv: Sequence[str], environ: Mapping[str, str], ranks: int, manner: Manner) -> int:
    """Run a launcher whose ranks report, say at the end what has happened, and return the exit code of the job."""
    received: list[int] = []
    output = Output(received)
    ended = watch(argv, environ, ranks, manner, received, output)
    output.say(ended.last_words)
    return ended.verdict.code


def watch(
    argv: Sequence[str],
    environ: Mapping[str, str],
    ranks: int,
    manner: Manner,
    received: list[int],
    output: Output,
    *,
    reads_input: bool = True,
    look: Callable[[Record], Look] = lambda record: Look(),
) -> Ended:
    """Run a launcher whose ranks report, and return how it ended.

    Args:
        received: gets the signals that come meanwhile.
        reads_input: rank 0 gets what is typed or piped into hvdrun; else its input is empty.
        look: asked ten times a second for what else there is to say, and whether to end the job.
    """
    columns = {stream: found for stream, fd in (("o", 1), ("e", 2)) if (found := _columns(fd))}
    record = Record(ranks)
    style = Style(ranks > 1 if manner.label is None else manner.label, manner.stamped, columns)
    arrivals = Arrivals(record, manner.patience)
    silence = Silence(record, manner.host_patience, process.is_this_machine)
    job = _Job(record, Screen(style, record.listen), arrivals, silence, output, manner.verbose, look)
    with process.started(argv, environ, received) as (child, end):
        assert child.stdin is not None
        job.feed = Feed(child.stdin.fileno(), reads_input)
        job.feed.start()
        try:
            job.read(child, end)
            code = child.wait()
        finally:
            job.feed.close()
    ending = next((number for number in received if number in ENDING), 0)
    verdict = judge(record, os.path.basename(argv[0]), process.as_in_a_shell(code), ending)
    if verdict.launcher_knows:
        job.let_go()
    output.write(job.screen.close())
    return Ended(verdict, record, job.screen.tail(verdict.tail_of) if verdict.tail_of is not None else [])


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
    output: Output
    verbose: bool
    look: Callable[[Record], Look]
    feed: Feed | None = None
    held: list[tuple[float, Piece]] = field(default_factory=list)  # the launcher's own words, and since when

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
                self._look(end)
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
            self.output.write(self.screen.feed(found.rank, found.kind, found.data))
        elif found.kind == "i":
            self.arrivals.note(found.rank, found.data)
            self.record.note(found.rank, found.kind, found.data)
        elif found.kind == "a" and self.feed:
            self.feed.taken(int(found.data))
        elif found.kind == "t":
            self.screen.keep(found.rank, found.data)
        else:
            self.record.note(found.rank, found.kind, found.data)
            if found.kind == "x" and found.rank == 0 and self.feed:
                self.feed.end()

    def _look_for_the_late(self, end: Callable[[], None]) -> None:
        late = None if self.record.late else self.arrivals.late()
        if late and late.final:
            self.record.late = late.words, late.rank
            end()
        elif late:
            words = f"hvdrun: {late.words}. The job waits on; --start-timeout S would end it after S seconds\n"
            self.output.write(self.screen.say("e", words.encode()))

    def _look(self, end: Callable[[], None]) -> None:
        look = self.look(self.record)
        self.output.write(
            [piece for line in look.lines for piece in self.screen.say("e", f"hvdrun: {line}\n".encode())]
        )
        if look.end and not self.record.late:
            self.record.late = look.end, None
            end()

    def _misses_a_host(self) -> bool:
        silent = None if self.record.late else self.silence.silent()
        if silent:
            self.record.late, self.record.silent = (silent.words, None), silent.ranks
        return silent is not None

    def _let_go_of_the_old(self) -> None:
        """Show what the launcher has said, unless it may belong to a failure: that is told better at the end."""
        if self.verbose or (self.record.first is None and self.held and time.monotonic() > self.held[0][0] + _HELD):
            self.let_go()

    def let_go(self) -> None:
        for _, (stream, text) in self.held:
            self.output.write(self.screen.say(stream, text))
        self.held.clear()
