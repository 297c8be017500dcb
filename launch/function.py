"""A function on ranks: what `hvdlite.run()` does in the calling process. The other end is launch/on_rank.py.

Function and results are files in a directory that only this user can enter: it needs no port that someone could
connect to, no limit on sizes, and what one rank has written is there though the job ends badly. hvdrun starts the
ranks, so that everything about launchers is in one place.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from hvdlite import config
from hvdlite.errors import LaunchError, RankFailedError, describe_ranks

from . import process
from .cli import CANNOT_START

CALL = "call"  # name of the file with the function
_LAST_MOMENTS = 3.0  # seconds for the others to end by themselves once a rank has failed


@dataclass(frozen=True)
class Call:
    """What a rank is to do."""

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Start:
    """How ranks are started. See `hvdlite.run`."""

    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    directory: str | None = None
    mpi_args: str = ""
    executable: str | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.ranks is not None and (not isinstance(self.ranks, int) or self.ranks < 1):
            raise LaunchError(f"run(num_proc={self.ranks!r}): expected a whole number of ranks, 1 or more.")
        if self.hosts and self.hostfile:
            raise LaunchError(f"run(hosts={self.hosts!r}, hostfile={self.hostfile!r}): give one of them.")


@dataclass(frozen=True)
class Answer:
    """What a rank has to say in the end.

    Attributes:
        size: number of ranks, as the launcher said.
        at: when it was written, seconds.
        result: pickled; None if the rank failed.
        what: the exception in a line, "" if there was none.
        trace: its traceback.
        error: itself, pickled; None where it cannot be.
    """

    size: int
    at: float
    result: bytes | None = None
    what: str = ""
    trace: str = ""
    error: bytes | None = None


def run(call: Call, start: Start) -> list[Any]:
    """Run `call` on ranks and return the results in rank order."""
    _refuse_within_a_rank()
    payload = pack(call)
    within = start.directory or ("." if start.hosts or start.hostfile else None)
    with process.scratch_directory(within) as directory:
        directory = process.absolute(directory)
        process.write_bytes(f"{directory}/{CALL}", payload)
        watch = _Watch(directory, start)
        ended = process.stream(command_for(start, directory), process.environment(), watch.over)
        answers = watch.answers()
        if ended.code == CANNOT_START and not answers and not start.verbose and (why := _own_words(ended.err)):
            raise LaunchError(f"no rank of {describe_call(call)} was started: {why}")
        if ended.code is None and not any(answer.what for answer in answers.values()):
            raise LaunchError(
                f"run(timeout={start.timeout!r}): {describe_call(call)} still ran after {start.timeout:g} s"
                f"{_who_is_missing(answers, start)}. All ranks have been ended."
            )
        return results_of(call, answers, start.ranks, ended.code)


def pack(call: Call) -> bytes:
    """Return a call as bytes, with where its modules are found."""
    if not callable(call.func):
        raise LaunchError(f"run({call.func!r}): expected a function, found {type(call.func).__name__}.")
    try:
        pickled = cloudpickle.dumps(call)
    except Exception as error:  # whatever the reduction of an object raises
        raise LaunchError(
            f"{describe_call(call)} and its arguments cannot be sent to the ranks: {type(error).__name__}: {error}. "
            "Make inside of the function what cannot be pickled, such as locks, files and connections."
        ) from error
    return pickle.dumps(([entry or process.absolute(".") for entry in sys.path], pickled))


def command_for(start: Start, directory: str) -> list[str]:
    """Return the command line that runs the call in `directory`."""
    python = start.executable or sys.executable
    command = [sys.executable, "-m", "hvdlite.launch", "--no-label"]
    if start.ranks or not (start.hosts or start.hostfile):
        command += ["-np", str(start.ranks or 1)]
    if start.hosts:
        command += ["-H", start.hosts]
    if start.hostfile:
        command += ["--hostfile", start.hostfile]
    for name, value in start.env.items():
        command += ["-x", f"{name}={value}"]
    if start.mpi_args:
        command.append(f"--mpi-args={start.mpi_args}")
    if start.verbose:
        command.append("--verbose")
    return [*command, python, "-m", "hvdlite.launch.on_rank", directory]


def results_of(call: Call, answers: Mapping[int, Answer], ranks: int | None, code: int | None) -> list[Any]:
    """Return the results in rank order, or raise what the first failed rank raised."""
    size = ranks or max((answer.size for answer in answers.values()), default=1)
    failed = {rank: answer for rank, answer in answers.items() if answer.what}
    if failed:
        rank = min(failed, key=lambda one: failed[one].at)
        answer = failed[rank]
        raise RankFailedError(
            f"{describe_call(call)} failed on rank {rank} of {size}: {answer.what}", rank, _with_file(answer.trace)
        ) from _exception(answer)
    missing = [rank for rank in range(size) if rank not in answers]
    if missing or code != 0:
        who = f"{describe_ranks(missing)} of {size} gave no result" if missing else "every rank gave its result"
        lost = missing[0] if len(missing) == 1 else None
        raise RankFailedError(
            f"{describe_call(call)}: {who}, and the job ended with exit code {code}. See above.", lost
        )
    return [_unpickled(answers[rank], rank) for rank in range(size)]


def describe_call(call: Call) -> str:
    return f"{getattr(call.func, '__qualname__', repr(call.func))}()"


class _Watch:
    """Looks for what ranks have written, and says when the job is to be ended."""

    def __init__(self, directory: str, start: Start) -> None:
        self._directory, self._start = directory, start
        self._deadline = None if start.timeout is None else time.monotonic() + start.timeout
        self._failed_at: float | None = None

    def answers(self) -> dict[int, Answer]:
        found = {}
        for name in process.names_in(self._directory):
            head, _, rank = name.partition("-")
            content = process.read_bytes(f"{self._directory}/{name}") if head == "rank" and rank.isdecimal() else None
            if content is not None:
                found[int(rank)] = pickle.loads(content)
        return found

    def over(self) -> bool:
        now = time.monotonic()
        if self._failed_at is None and "failed" in process.names_in(self._directory):
            self._failed_at = now
        if self._failed_at is not None and now > self._failed_at + _LAST_MOMENTS:
            return True
        return self._deadline is not None and now > self._deadline


def _own_words(said: str) -> str:
    """Return what hvdrun itself said last, "" if nothing but that it is root."""
    own = [line.removeprefix("hvdrun: ") for line in said.splitlines() if line.startswith("hvdrun: ")]
    own = [line for line in own if not line.startswith("running as root")]
    return own[-1].removeprefix("error: ") if own else ""


def _who_is_missing(answers: Mapping[int, Answer], start: Start) -> str:
    missing = [rank for rank in range(start.ranks or 1) if rank not in answers]
    return f" on {describe_ranks(missing)}" if missing else ""


def _refuse_within_a_rank() -> None:
    size = config.launcher_size(process.environment())
    if size is not None and size[1] in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        raise LaunchError(
            f"hvdlite.run() starts ranks, and this process is a rank itself ({size[1]}={size[0]}). "
            "Start the program without mpirun or hvdrun, or call the function itself."
        )


def _with_file(trace: str) -> str:
    """Return a traceback with the script's name: cloudpickle leaves it out of the functions of `__main__`."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return trace.replace('File "<dynamic-code>"', f'File "{script}"') if script else trace


def _exception(answer: Answer) -> BaseException | None:
    try:
        error = pickle.loads(answer.error) if answer.error else None
    except Exception:  # its constructor wants something else; the text is in the message
        return None
    return error if isinstance(error, BaseException) else None


def _unpickled(answer: Answer, rank: int) -> Any:
    try:
        return pickle.loads(answer.result or b"")
    except Exception as error:  # whatever a class does when it comes back
        message = f"the result of rank {rank} cannot be unpickled here: {type(error).__name__}: {error}"
        raise RankFailedError(message, rank) from error
