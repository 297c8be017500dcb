"""Looking at the machine and starting processes. Everything that `hvdrun` does rather than decides."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

from hvdlite.errors import LaunchError

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def environment() -> dict[str, str]:
    """Return a copy of the environment."""
    return dict(os.environ)


def is_root() -> bool:
    return os.geteuid() == 0


def is_this_machine(host: str) -> bool:
    """Return whether a name is one that this machine has for itself. Nothing is asked on the network."""
    own = socket.gethostname()
    return host in ("localhost", "127.0.0.1", own, own.partition(".")[0])


def bin_dir() -> str:
    """Return the directory of this interpreter, whose environment `hvdrun` belongs to."""
    return os.path.dirname(os.path.abspath(sys.executable))  # links kept: a virtual environment's python is one


def which(name: str, path: str) -> str | None:
    """Return the program `name` on `path`, or None."""
    return shutil.which(name, path=path)


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


def run(argv: Sequence[str], environ: Mapping[str, str], stamped: bool = False) -> int:
    """Run a program to its end and return its exit code; 128 + n if signal n ended it, as shells say.

    `stamped` puts the time in front of each line of its output.

    Signals sent to this process go on to the program. It gets a session of its own, so
    that Ctrl-C in a terminal reaches it once and not twice: a second one makes Open MPI
    give up without cleaning.
    """
    received: list[int] = []  # before the program exists
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            received.append(number)
        elif child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        pipe = subprocess.PIPE if stamped else None
        child = subprocess.Popen(argv, env=dict(environ), start_new_session=True, stdout=pipe, stderr=pipe)
        for number in received:
            child.send_signal(number)
        copies = _stamp(child) if stamped else []
        code = child.wait()
        for copy in copies:
            copy.join()
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be run: {error}") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _stamp(child: subprocess.Popen[bytes]) -> list[threading.Thread]:
    """Copy a program's output to this one's on threads, line by line, with the time in front."""
    pairs = [(child.stdout, sys.stdout), (child.stderr, sys.stderr)]
    copies = [
        threading.Thread(target=_copy_lines, args=(source, target.buffer), daemon=True)
        for source, target in pairs
        if source is not None
    ]
    for copy in copies:
        copy.start()
    return copies


def _copy_lines(source: IO[bytes], target: IO[bytes]) -> None:
    with source, contextlib.suppress(BrokenPipeError):
        for line in source:
            target.write(time.strftime("%Y-%m-%d %H:%M:%S ").encode() + line)
            target.flush()
