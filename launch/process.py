"""Looking at the machine and starting processes. Everything that `hvdrun` does rather than decides."""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any, TextIO

from hvdlite.errors import LaunchError

from . import guard

DEFAULT_PATH = os.defpath  # where programs are looked for that have no PATH
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_GRACE = 5.0  # seconds that a program gets to end by itself
_HASTE = 1.0  # seconds, where hvdrun itself was told to end
_END = 4000  # characters of a program's output that are kept
_LOOK = 0.1  # seconds between two looks at what a program has done


def environment() -> dict[str, str]:
    """Return a copy of the environment."""
    return dict(os.environ)


def is_root() -> bool:
    return os.geteuid() == 0


def home() -> str:
    """Return the directory of this user, `/` where it has none."""
    found = os.path.expanduser("~")
    return "/" if found == "~" else found


def host_name() -> str:
    return socket.gethostname()


def is_this_machine(host: str) -> bool:
    """Return whether a name is one that this machine has for itself. Nothing is asked on the network."""
    own = host_name()
    return host in ("localhost", "127.0.0.1", own, own.partition(".")[0])


def bin_dir() -> str:
    """Return the directory of this interpreter, whose environment `hvdrun` belongs to."""
    return os.path.dirname(os.path.abspath(sys.executable))  # links kept: a virtual environment's python is one


def which(name: str, path: str) -> str | None:
    """Return the program `name` on `path`, or None."""
    return shutil.which(name, path=path)


def is_file(path: str) -> bool:
    return os.path.isfile(path)


def read_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read {path}: {error}") from error


def absolute(path: str) -> str:
    """Return a path that means the same in every working directory."""
    return os.path.abspath(os.path.expanduser(path))


def write_file(path: str, text: str) -> int:
    """Write `text` to a file, or to the standard output for `-`. Returns 0, for an exit code."""
    if path == "-":
        sys.stdout.write(text)
        return 0
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error}") from error
    return 0


def ask(argv: Sequence[str]) -> str:
    """Return what a program prints, on either stream. Raises LaunchError when it cannot be run."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{argv[0]} cannot be run: {error}") from error
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `code` is None if its time was over, or if it could not be started: `err` says which."""

    code: int | None
    out: str
    err: str


def probe(
    argv: Sequence[str],
    environ: Mapping[str, str],
    seconds: float,
    text: str = "",
    over: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run a program that may hang, with all that it starts, for at most so long. It reads `text`. Raises nothing.

    `over()` is asked every tenth of a second whether to end it sooner.
    """
    try:
        child = subprocess.Popen(
            argv, env=dict(environ), stdin=subprocess.PIPE if text else subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Outcome(None, "", f"{argv[0]} cannot be run: {error}")
    until, unsent = time.monotonic() + seconds, text or None
    try:
        while True:
            try:
                out, err = child.communicate(unsent, timeout=max(0.0, min(_LOOK, until - time.monotonic())))
                return Outcome(child.returncode, out, err)
            except subprocess.TimeoutExpired:
                unsent = None  # it is on its way, and must not be given twice
            if over():
                _end(child, _HASTE)
                return Outcome(None, "", "ended before it was through")
            if time.monotonic() >= until:
                out, err = _end(child, _GRACE)
                return Outcome(None, out, f"{err}\nstill running after {seconds:g} s".lstrip())
    except BaseException:  # Ctrl-C
        _end(child, _GRACE)
        raise


def _end(child: subprocess.Popen[str], grace: float) -> tuple[str, str]:
    """End a program with all that it started, and return what it has said."""
    stop(child, grace)
    try:
        return child.communicate(timeout=grace)
    except subprocess.TimeoutExpired:  # somebody who cannot be seen from here holds the pipes
        return "", ""


def stop(child: subprocess.Popen[Any], grace: float) -> None:
    """End a program and all that it started; gently first, as an mpirun ends its ranks itself."""
    started = _descendants(child.pid)  # those that made sessions of their own, too, which no signal to a group reaches
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pid, since in started.items():
        if (_parent_and_start(pid) or (0, ""))[1] == since:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    child.wait()


def _descendants(root: int) -> dict[int, str]:
    """Return the processes that descend from `root`, and when each started: a number alone may be given anew."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    known = {pid: found for pid in pids if (found := _parent_and_start(pid))}
    family = {root}
    while more := {pid for pid, (parent, _) in known.items() if parent in family} - family:
        family |= more
    return {pid: known[pid][1] for pid in family - {root}}


def _parent_and_start(pid: int) -> tuple[int, str] | None:
    """Return a process' parent and when it started, in the kernel's ticks; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may contain anything
    except OSError:
        return None
    return int(fields[1]), fields[19]


def stream(argv: Sequence[str], environ: Mapping[str, str], over: Callable[[], bool]) -> Outcome:
    """Run a program and pass on what it says to `sys.stdout` and `sys.stderr`, which in a notebook are not files.

    `over()` is asked every tenth of a second whether to end it; then its code is None. Whatever is raised meanwhile,
    Ctrl-C above all, ends the program first. It works in any thread, and sets no signal handlers. Of the output
    only the end comes back.
    """
    child = subprocess.Popen(
        argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    ends: tuple[list[str], list[str]] = [], []
    pipes = (child.stdout, sys.stdout, ends[0]), (child.stderr, sys.stderr, ends[1])
    readers = [threading.Thread(target=_pass_on, args=one, daemon=True) for one in pipes]
    for reader in readers:
        reader.start()
    ended = False
    try:
        with guard.guarded(child.pid):
            while child.poll() is None and not ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK)
                ended = child.poll() is None and over()
    finally:
        if child.poll() is None:
            stop(child, 2 * _GRACE)
        for reader in readers:
            reader.join(_GRACE)  # not longer: somebody who cannot be seen from here may hold the pipe
    return Outcome(None if ended else child.returncode, "".join(ends[0]), "".join(ends[1]))


def _pass_on(pipe: IO[bytes], target: TextIO, end: list[str]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        piece = os.read(pipe.fileno(), 65536)
        text = decoder.decode(piece, final=not piece)
        end[:] = ["".join([*end, text])[-_END:]]
        target.write(text)
        target.flush()
        if not piece:
            pipe.close()
            return


@contextlib.contextmanager
def scratch_directory(within: str | None = None) -> Iterator[str]:
    """Give a directory that only this user can enter, and that is removed afterwards."""
    try:
        directory = tempfile.TemporaryDirectory(prefix="hvdlite-", dir=within, ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(f"cannot make a directory in {within!r}: {error}") from error
    with directory as path:
        yield path


def names_in(directory: str) -> list[str]:
    return os.listdir(directory)


def read_bytes(path: str) -> bytes | None:
    """Return what is in a file, or None if there is no such file."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error}") from error


def write_bytes(path: str, content: bytes) -> None:
    """Write a file that others find complete or not at all."""
    try:
        with open(f"{path}.part", "wb") as file:
            file.write(content)
        os.replace(f"{path}.part", path)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error}") from error


@contextlib.contextmanager
def signals_noted(received: list[int], told: Callable[[], None]) -> Iterator[None]:
    """Until the end of the block signals sent to this process go into `received`, and `told()` is called for each.

    It is meant for what lies between several uses of `started`, each of which handles them itself.
    """

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        told()

    before = {number: signal.signal(number, note) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program to its end and return its exit code, as shells say it."""
    with started(argv, environ, [], piped=False) as (child, _):
        return as_in_a_shell(child.wait())


def as_in_a_shell(code: int) -> int:
    """Return an exit code; 128 + n if signal n ended the program."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def started(
    argv: Sequence[str], environ: Mapping[str, str], received: list[int], piped: bool = True
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], None]]]:
    """Start a program. Until the end of the block signals sent to this process go on to it, and into `received`.

    Those that tell it to end also if they are there already. Gives the program, and a function that ends it.

    It gets a session of its own, so that Ctrl-C in a terminal reaches it once and not twice: a second one makes
    Open MPI give up without cleaning. If this process is killed, or the program does not end when told to, its
    guard ends it.
    """
    early = [number for number in received if number in guard.ENDING]  # before the program exists
    child: subprocess.Popen[bytes] | None = None
    told: Callable[[], None] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is None:
            early.append(number)
        else:
            send(number)

    def send(number: int) -> None:
        if child is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # no mpirun minds SIGQUIT: it would end, and its ranks go on
                child.send_signal(signal.SIGTERM if number == signal.SIGQUIT else number)
            if told and number in guard.ENDING:
                told()

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        way = subprocess.PIPE if piped else None
        try:
            child = subprocess.Popen(argv, env=dict(environ), start_new_session=True, stdin=way, stdout=way, stderr=way)
        except OSError as error:
            raise LaunchError(f"{argv[0]} cannot be run: {error}") from error
        with guard.guarded(child.pid) as told:
            for number in early:
                send(number)
            if any(number in guard.ENDING for number in received):  # also one that came before there was a guard
                told()
            yield child, lambda: send(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for pipe in (child.stdin, child.stdout, child.stderr) if child is not None else ():
            if pipe:
                pipe.close()
