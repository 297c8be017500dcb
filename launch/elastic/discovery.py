"""Which hosts there are now: a script says it, asked every second beside the job, which never waits for it.

The script is horovodrun's: a command for the shell that prints a host a line, `host` or `host:slots`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hvdlite.errors import LaunchError

from ..hosts import Host, parse_hosts
from ..process import Outcome

EVERY = 1.0  # seconds between two questions, as in horovodrun
LIMIT = 30.0  # seconds that a script may take: some ask a cloud; longer is a hang
_LONGEST = 300  # characters of what a script says that are repeated


def parse(text: str, slots: int) -> tuple[Host, ...]:
    """Read what a script has printed. Raises ValueError with what is wrong with it.

    Of a host that is named repeatedly the last line counts. One with 0 slots is left out.

    Args:
        slots: of a host without a number.
    """
    found: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, colon, number = line.rpartition(":")
        if not colon:
            name, number = line, str(slots)
        if not _is_number(number) or not _is_name(name):
            raise ValueError(f"expected lines such as node1 or node1:4, found {line[:_LONGEST]!r}")
        found[name] = int(number)
    return tuple(Host(name, number) for name, number in found.items() if number)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _is_name(name: str) -> bool:
    try:
        return [host.name for host in parse_hosts(name)] == [name]  # no ranges, no commas
    except LaunchError:
        return False


def read(outcome: Outcome, script: str, slots: int) -> tuple[Host, ...]:
    """Return the hosts that a script has named. Raises ValueError with why there are none."""
    if outcome.code is None:
        raise ValueError(f"{script!r}: {outcome.err.strip().splitlines()[-1][:_LONGEST]}, and was ended")
    if outcome.code:
        lines = [line for line in (outcome.err or outcome.out).splitlines() if line.strip()] or ["nothing"]
        said = f"ended with exit code {outcome.code} and said: {lines[-1].strip()[:_LONGEST]}"
        raise ValueError(f"{script!r} {said}{_hint(outcome.code, script)}")
    try:
        return parse(outcome.out, slots)
    except ValueError as error:
        raise ValueError(f"{script!r}: {error}") from None


def _hint(code: int, script: str) -> str:
    word = (script.split() or [script])[0]
    if code == 127 and "/" not in word:
        return f". Programs are looked for on PATH; for one in this folder say ./{word}"
    return f". Make it a program: chmod +x {word}" if code == 126 else ""


class Discovery:
    """Asks again and again, in a thread of its own.

    Args:
        ask: runs the script and returns how it ended. It has to return soon when the job ends.
        over: whether the job ends.
    """

    def __init__(self, ask: Callable[[], Outcome], script: str, slots: int, over: Callable[[], bool]) -> None:
        self._ask, self._script, self._slots, self._over = ask, script, slots, over
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._said: set[str] = set()
        self._unsaid: list[str] = []
        self.found: tuple[Host, ...] | None = None  # None: no answer so far
        self.fault = ""  # of the first answer, which has to be right
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_now(self) -> tuple[Host, ...]:
        """Ask once, and return the answer. Raises ValueError with why there is none."""
        return read(self._ask(), self._script, self._slots)

    def stop(self) -> None:
        """End it, also a script that runs: `ask` looks at `is_over`."""
        self._stop.set()
        self._thread.join()

    @property
    def is_over(self) -> bool:
        return self._stop.is_set() or self._over()

    def wait(self, seconds: float) -> None:
        """Wait until there are other hosts, at most so long."""
        if self._changed.wait(seconds):
            self._changed.clear()

    def notes(self) -> Sequence[str]:
        """Return what went wrong since the last time, each of it once in a job."""
        unsaid, self._unsaid = self._unsaid, []
        return unsaid

    def _run(self) -> None:
        while not self.is_over and not self.fault:
            outcome = self._ask()
            if self.is_over:
                return
            try:
                self._take(read(outcome, self._script, self._slots))
            except ValueError as error:
                self._fail(str(error))
            self._stop.wait(EVERY)

    def _take(self, hosts: tuple[Host, ...]) -> None:
        if self.found != hosts:
            self.found = hosts
            self._changed.set()

    def _fail(self, what: str) -> None:
        if self.found is None:
            self.fault = what
            self._changed.set()
        elif what not in self._said:
            self._said.add(what)
            self._unsaid = [*self._unsaid, f"{what}. The last answer counts meanwhile; this is told once"]
