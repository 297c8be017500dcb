"""What follows when a start of a job of changing size has ended: another one, or the end of the job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hvdlite.errors import describe_ranks

from ..verdict import Record, Verdict

CRASHES = 3  # failures in a row, without a commit between them, that end a job
ASKED = 75  # exit code when ranks were asked to leave: EX_TEMPFAIL of sysexits.h, try again later
COMMIT, LEAVES, LEAVES_FOR_GOOD = "c", "l", "p"  # what ranks tell (hvdlite/elastic/link.py)


class How(Enum):
    """How a start ended."""

    DONE = "done"
    RESIZE = "its ranks left for another size"
    ASKED = "its ranks were asked to leave by a signal"
    FAILED = "failed"


def how(record: Record) -> How:
    """Return how a start ended, by what its ranks told: what mpirun's exit code says is not always so.

    Open MPI may end with 0 when it loses a host, and with 1 or more for reasons of its own when all is done.
    """
    codes = [end.code for end in record.ends.values()]
    if len(codes) < record.size or any(codes):
        return How.FAILED
    if record.who_told(LEAVES_FOR_GOOD):
        return How.ASKED
    return How.RESIZE if record.who_told(LEAVES) else How.DONE


def culprits(record: Record) -> Sequence[int]:
    """Return the ranks whose hosts may be to blame for a failure.

    Those whose hosts are out of reach. Else who failed first, but not because of another one; else who was lost without
    a word. Nobody, where all ranks on several hosts were: then it was the launcher.
    """
    if record.silent:
        return record.silent
    first = record.first
    followed = {rank for rank, follows in record.called if follows}
    if record.late and record.late[1] is not None:
        return [record.late[1]]
    if first is not None and first not in followed:
        return [first]
    if record.lost and (len(record.lost) < record.size or len(set(record.hosts.values())) == 1):
        return record.lost
    return []


@dataclass(frozen=True)
class Next:
    """What follows: the end with an exit code, or another start; and why, in words."""

    words: str
    code: int | None = None  # None: another start


@dataclass
class History:
    """What has happened so far.

    Args:
        resets: how often a job may start again; None: as often as it takes.
    """

    resets: int | None = None
    starts: int = 0
    failures: int = 0  # in a row, without a commit between them
    first_cause: str = ""  # of the first of those

    @property
    def may_reset(self) -> bool:
        return self.resets is None or self.starts <= self.resets

    def after(self, record: Record, verdict: Verdict, received: int = 0, is_asked: bool = False) -> Next:
        """Take notice of how a start ended, and return what follows.

        Args:
            received: the signal by which hvdrun was told to end; 0: it was not.
            is_asked: hvdrun got the signal that asks the ranks to leave, and has handed it on.
        """
        ended = how(record)
        if ended is How.DONE:
            return Next("", 0)
        if received:
            return Next(verdict.words or "ended by a signal", 128 + received)
        if ended is How.ASKED:
            return Next(self._who_was_asked(record), ASKED)
        if is_asked:
            return Next(f"the job is not done: {verdict.words or 'its ranks left'}, after hvdrun got SIGUSR1", ASKED)
        if record.who_told(COMMIT):
            self.failures = 0
        if ended is How.RESIZE:
            words = "there are other hosts, or slots"
            return Next(words) if self.may_reset else Next(f"the job is not done: {words}. {self._no_more()}", 1)
        return self._after_failure(record, verdict)

    def _after_failure(self, record: Record, verdict: Verdict) -> Next:
        words, code = verdict.words or "the launcher ended, and not all ranks did", verdict.code or 1
        self.failures += 1
        if self.failures == 1:
            self.first_cause = f"start {self.starts}: {words}"
        if self.starts == 1 and not record.hosts:  # the command line is wrong, most likely
            return Next(words, code)
        if self.failures >= CRASHES:
            return Next(
                f"{words}. hvdrun gives up after {self.failures} failures in a row without a new commit between "
                f"them. The first one: {self.first_cause}",
                code,
            )
        if not self.may_reset:
            return Next(f"{words}. {self._no_more()}", code)
        return Next(words)

    def _no_more(self) -> str:
        return f"The job may not start again: --reset-limit {self.resets}"

    def _who_was_asked(self, record: Record) -> str:
        who = describe_ranks(record.who_told(LEAVES_FOR_GOOD))
        return f"the job is not done: {who} of {record.size} had been asked to leave by a signal"
