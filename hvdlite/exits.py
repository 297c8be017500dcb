"""How a rank ends: a failed one takes the job with it, and a finished one waits for the others in peace.

Bare MPI hangs when one rank raises, because the others wait for it. Installed by
`init()` where there is more than one rank, and only once per process.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

Abort = Callable[[int], None]

_LAST_WORDS = 0.3  # seconds


class _RecordedExit(SystemExit):
    """A SystemExit that can tell whether it ended the program or was caught.

    When it ended the program, the interpreter drops it with no Python frame left to run.
    """

    def __init__(self, watch: ExitWatch, code: Any) -> None:
        super().__init__(code)
        self._watch = watch
        watch.pending = (id(self), _status(code))

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            return
        if self._watch.pending is not None and self._watch.pending[0] == id(self):
            self._watch.pending = None


class ExitWatch:
    """Notices how this process ends.

    Args:
        describe: names this rank, for the one message: "rank 1 of 4".
        abort: ends all ranks with an exit status. Does not return where that is possible.
        on_normal_end: called at the end of a program that did not fail.
    """

    def __init__(self, describe: Callable[[], str], abort: Abort, on_normal_end: Callable[[], None]) -> None:
        self._describe, self._abort, self._on_normal_end = describe, abort, on_normal_end
        self.pending: tuple[int, int] | None = None  # identity and code of a sys.exit that has not been caught
        self._armed = True
        self._child_status = 0
        self._previous_hook = sys.excepthook
        self._sys_exit = sys.exit

    def install(self) -> None:
        """Start to watch. The hooks stay until the process ends."""
        sys.excepthook = self._on_exception
        sys.exit = self._exit
        for name in ("exit", "quit"):  # site's versions raise SystemExit themselves
            if hasattr(builtins, name):
                setattr(builtins, name, self._exit)
        atexit.register(self._at_exit)
        # Before the interpreter waits for the program's threads, which may wait for an operation for ever.
        # concurrent.futures uses the same private hook for the same reason; without it only atexit is left.
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(self._end_if_failed)
        os.register_at_fork(after_in_child=self.disarm)

    def disarm(self) -> None:
        """A child made by fork is no rank: however it ends, the job goes on."""
        self._armed = False

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._previous_hook(kind, error, trace)
        finally:
            first_line = str(error).split("\n", 1)[0]
            cause = f"{kind.__name__}: {first_line}" if first_line else kind.__name__
            self._end(cause, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _exit(self, code: Any = None) -> NoReturn:
        if threading.current_thread() is not threading.main_thread() or not _status(code):
            self._sys_exit(code)
        raise _RecordedExit(self, code)  # not kept in a variable: the traceback would keep it alive through this frame

    def _at_exit(self) -> None:
        self._end_if_failed()
        if self._armed:
            self._on_normal_end()
        else:
            self._leave_child()

    def _leave_child(self) -> None:
        """End a child made by fork here: what comes next is MPI_Finalize, which would wait for the other ranks."""
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        os._exit(self._child_status)

    def _end_if_failed(self) -> None:
        if self.pending is not None:
            self._end(f"its program called sys.exit({self.pending[1]})", self.pending[1])

    def _end(self, cause: str, code: int) -> None:
        if not self._armed:
            self._child_status = code
            return
        end_all_ranks(self._describe(), cause, self._abort, code)


def end_all_ranks(rank: str, cause: str, abort: Abort, code: int) -> None:
    """Say why this rank ends the job, so that hvdrun finds it (launch/verdict.py), and end it.

    Args:
        rank: `rank 1 of 4`.
    """
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    _say(f"hvdlite: {rank} failed, so all ranks end now. Cause: {cause}")
    # mpirun kills at once when it hears of the abort, and drops what it has not read yet: without
    # this, one run in twenty loses this line or part of the traceback.
    time.sleep(_LAST_WORDS)
    abort(code)


def _status(code: Any) -> int:
    """Return the exit status that Python makes of the argument of sys.exit."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _flush(stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or a broken pipe: the abort matters more
        stream.flush()


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")  # in one piece: what other ranks write at the same time stays outside the line
        sys.stderr.flush()
