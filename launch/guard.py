"""Sees to it that a launcher ends: when hvdrun is gone, even by SIGKILL, and when it does not end although told to.

A launcher that lives on keeps its ranks running on every host. hvdrun cannot end it any more once it is killed
itself, so a shell waits beside it, at a pipe that ends with hvdrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

PATIENCE = 5  # seconds from the first signal to the last one; Open MPI gives its ranks 1, and 10 is the promise
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

# A line: the launcher was told to end, see to it. The end of the pipe: hvdrun is gone, tell it.
_SCRIPT = f"""\
read -r told || kill -s TERM $1
n={PATIENCE}
while [ $n -gt 0 ]; do
    sleep 1
    kill -s 0 $1 || exit
    n=$((n - 1))
done
kill -s KILL -- -$1
"""


@contextlib.contextmanager
def guarded(pid: int) -> Iterator[Callable[[], None]]:
    """Watch a program that leads a process group of its own, until the block ends.

    Gives a function to call when the program was told to end: it is then killed, if it has not ended after PATIENCE.
    """
    watcher = subprocess.Popen(
        ["sh", "-c", _SCRIPT, "sh", str(pid)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert watcher.stdin is not None
    pipe = watcher.stdin.fileno()

    def told() -> None:
        with contextlib.suppress(OSError):  # it is gone: the program has ended
            os.write(pipe, b"\n")

    try:
        yield told
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(watcher.pid, signal.SIGKILL)  # with its sleep
        watcher.wait()
        watcher.stdin.close()
