"""How a job ended, and why: from what the ranks reported to hvdrun's last words and its exit code. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdlite.errors import describe_ranks

LOST = 1  # exit code of a job that nobody calls failed, but that lost a rank
# How a rank, or Open MPI for it, says that it ends the job: hvdlite/exits.py, MPICH's and Open MPI's MPI_Abort.
_CALLS = (
    re.compile(rb"hvdlite: rank (?P<rank>\d+) of \d+ failed, so all ranks end now\. Cause: (?P<cause>\w*)"),
    re.compile(rb"Abort\(\d+\) on node \d+ \(rank (?P<rank>\d+) in comm 0\): (?P<cause>.*)"),
)
_OPEN_MPIS_CALL = re.compile(rb"MPI_ABORT was invoked on rank (\d+) in communicator MPI_COMM_WORLD")
# How Open MPI and ssh say that a host is lost.
_LOSSES = (
    re.compile(rb"Remote daemon: \[\S+\] on node ([\w.-]+)"),
    re.compile(rb"Connection to ([\w.-]+) closed by remote host"),
)
_FOLLOWS = (b"RemoteError", b"CommunicationError")  # another rank's failure is behind them
_ASKED = -signal.SIGTERM  # how a rank ends that the launcher has asked to
_LONGEST = 500  # characters of a line that is repeated


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, or minus the signal; when (seconds since 1970), and where."""

    code: int
    at: float
    host: str


@dataclass
class Record:
    """What is known of a job.

    Attributes:
        size: how many ranks it should have.
        hosts: where ranks have started.
        processes: the numbers of their programs there.
        ends: of the ranks that have reported it.
        cut_off: hosts to which the launcher says that it has lost its connection.
        called: ranks that said that they end the job, and whether because of another one; the first one first.
        late: why hvdrun ended the job, and a rank whose last lines may help. None: it did not.
        silent: ranks on hosts that are out of reach.
        marks: what ranks told about an elastic job, single letters (launch/elastic/history.py).
    """

    size: int
    hosts: dict[int, str] = field(default_factory=dict)
    processes: dict[int, int] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    cut_off: list[str] = field(default_factory=list)
    called: list[tuple[int, bool]] = field(default_factory=list)
    late: tuple[str, int | None] | None = None
    silent: Sequence[int] = ()
    marks: dict[int, set[str]] = field(default_factory=dict)

    def note(self, rank: int, kind: str, data: bytes) -> None:
        """Take notice of what a rank tells about itself."""
        if kind == "s":
            process, self.hosts[rank] = data.decode().split(" ", 1)
            self.processes[rank] = int(process)
        elif kind == "x":
            code, at, host = data.decode().split(" ", 2)
            self.ends[rank] = End(int(code), float(at), host)
        elif kind == "i":
            self.marks.setdefault(rank, set()).update(data.decode("ascii", "replace"))

    def who_told(self, mark: str) -> list[int]:
        """Return the ranks that told this."""
        return sorted(rank for rank, marks in self.marks.items() if mark in marks)

    def listen(self, rank: int, line: bytes) -> None:
        """Look whether a rank says in this line that it ends the job."""
        for pattern in _CALLS:
            found = pattern.match(line)
            if found and int(found["rank"]) == rank:
                self.called.append((rank, found["cause"] in _FOLLOWS))

    def overhear(self, text: bytes) -> None:
        """Look whether the launcher says which rank ended the job, or which host is lost."""
        found = {host.decode() for pattern in _LOSSES for host in pattern.findall(text)}
        self.cut_off = sorted(found.intersection(self.hosts.values()).union(self.cut_off))
        self.called += [(int(rank), False) for rank in _OPEN_MPIS_CALL.findall(text)]

    @property
    def first(self) -> int | None:
        """The rank that failed first; the others may have failed because of it. None if none did.

        One that said so comes first, then one that nobody has asked to end, then one that says that another has
        failed: a killed rank says nothing, and the others notice and call.
        """
        called = [one for one in self.called if one[0] not in self.ends or self.ends[one[0]].code != 0]
        by_themselves = [rank for rank, follows in called if not follows]
        if by_themselves:
            return by_themselves[0]
        following = [rank for rank, _ in called]
        failed = [rank for rank, end in self.ends.items() if end.code not in (0, _ASKED) and rank not in following]
        return min(failed, key=lambda rank: self.ends[rank].at, default=following[0] if following else None)

    @property
    def lost(self) -> list[int]:
        """The ranks that have not reported their end."""
        return [rank for rank in range(self.size) if rank not in self.ends]


@dataclass(frozen=True)
class Verdict:
    """What hvdrun says last, its exit code, and whether the launcher's own words are needed to understand it."""

    code: int
    words: str = ""
    tail_of: int | None = None
    launcher_knows: bool = False


def judge(record: Record, launcher: str, code: int, received: int = 0) -> Verdict:
    """Return how a job ended whose launcher ended with `code`, after hvdrun got the signal `received` (0: none)."""
    first, lost = record.first, record.lost
    if received and (code or first is not None or lost):
        return Verdict(128 + received, f"ended by {signal.Signals(received).name}")
    if record.late:
        return Verdict(LOST, *record.late)
    if first is not None:
        return _of_rank(record, first, code)
    if not record.hosts:
        return Verdict(code or LOST, f"no rank was started; {launcher} ended with exit code {code}", None, True)
    ended = [rank for rank, end in record.ends.items() if end.code == 0]
    asked = [rank for rank in record.ends if rank not in ended]
    early = f" after {describe_ranks(ended)} had ended with exit code 0" if ended else ""
    if record.cut_off:
        there = describe_ranks(rank for rank, host in record.hosts.items() if host in record.cut_off)
        words = f"{launcher} lost its connection to {', '.join(record.cut_off)}, with {there} of {record.size}"
        return Verdict(code or LOST, f"{words}: its daemon there was killed, or the host is down")
    if lost:
        hosts = sorted({record.hosts[rank] for rank in lost if rank in record.hosts})
        where = f" on {', '.join(hosts)}" if hosts else ""
        words = f"{describe_ranks(lost)} of {record.size}{where} never reported an end{early}: killed, or out of reach"
        if len(lost) == record.size:
            words += ", or a rank called MPI_Abort"  # MPICH then kills all before they can tell
        elif asked:
            words += f", and {describe_ranks(asked)} got SIGTERM"
        return Verdict(code or LOST, f"{words}. {launcher} ended with exit code {code}", None, not ended)
    if not ended:  # nobody told hvdrun
        rank = min(record.ends, key=lambda rank: record.ends[rank].at)
        words = f"rank {rank} of {record.size} on {record.ends[rank].host} was ended by signal 15 (SIGTERM)"
        words += ", before all others: by hand, or by what looks after jobs and memory here"
        return Verdict(128 + signal.SIGTERM, words, rank)
    if asked:
        words = f"{launcher} ended {describe_ranks(asked)} of {record.size}{early}"
        return Verdict(code or LOST, words, None, not ended)
    if code:
        return Verdict(code, f"every rank ended with exit code 0, but {launcher} with {code}", None, True)
    return Verdict(0)


def _of_rank(record: Record, rank: int, code: int) -> Verdict:
    end = record.ends.get(rank)
    where = f"rank {rank} of {record.size} on {end.host if end else record.hosts.get(rank, 'an unknown host')}"
    if end is None or end.code == _ASKED:  # the launcher was faster than the rank
        return Verdict(code or LOST, f"{where} ended the job with exit code {code}", rank)
    return Verdict(end.code if end.code > 0 else 128 - end.code, f"{where} {_cause(end.code)}", rank)


def last_words(words: str, tail: list[bytes], rank: int | None) -> str:
    """Return the final message, with the last lines of a rank."""
    lines = [line.decode("utf-8", "replace")[:_LONGEST] for line in tail if line.strip()]
    if not lines:
        return f"hvdrun: {words}\n"
    return "".join([f"hvdrun: {words}; its last lines:\n", *(f"[{rank}] {line}\n" for line in lines)])


def _cause(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        name = f"{-code} ({signal.Signals(-code).name})"
    except ValueError:
        name = str(-code)
    why = ", by hand or because the machine was out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {name}{why}"
