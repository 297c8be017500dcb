"""Breaking one rank of a running job on purpose, to see what the others and the launcher make of it.

    with faults.inject("die", rank=1, number=10):
        train()                      # rank 1 is killed when it submits its tenth operation

Only what a process can do to itself: how hosts and networks are broken from outside is in tests/hosts. Without a block
nothing is changed; within one only the engine of the chosen rank is, whose operations then take the long way,
which is that of operations in any order.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from hvdlite import runtime
from hvdlite.engine.engine import Engine
from hvdlite.engine.inbox import Submission

Fault = Literal[
    "die", "die_sending", "partition", "delay", "slow", "wrong_shape", "wrong_dtype", "never_submit", "stuck", "raise"
]

_PATCHED = ("submit", "submit_repeated", "allreduce_at_once")
_POLL = 50e-6  # seconds between two looks at whether a transfer has begun


class InjectedError(Exception):
    """What the fault "raise" raises, as user code would."""


@contextmanager
def inject(kind: Fault, *, rank: int, number: int = 1, seconds: float = 0.01) -> Iterator[None]:
    """Break one rank within the block. Every rank may enter it; nothing happens on the others. Not collective.

    `die`          SIGKILL before an operation is submitted, as from the kernel when memory is out
    `die_sending`  SIGKILL within the first transfer after that, while others wait for this rank's bytes or read its
                   memory; make it a large one
    `partition`    SIGSTOP at that moment: the process neither sends nor answers, and nobody tells the others, as
                   when its host is out of reach
    `stuck`        the caller never comes to submit it; the engine still answers
    `never_submit` the operation gets lost, and its caller waits for ever
    `raise`        the caller gets an InjectedError
    `wrong_shape`  the others are told of one element more in each tensor
    `wrong_dtype`  the others are told of another dtype
    `delay`        a pause before the operation
    `slow`         a pause before this and each later one

    Args:
        rank: global rank of the one that is broken.
        number: which submission in the block, counted from 1; a grouped call counts as one.
        seconds: of the pauses of `delay` and `slow`.
    """
    found = runtime.current("faults.inject()")
    if kind not in get_args(Fault):
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(get_args(Fault))}")
    if not 0 <= rank < found.size:
        raise ValueError(f"rank={rank}: this job has ranks 0 to {found.size - 1}")
    if number < 1:
        raise ValueError(f"number={number}: submissions are counted from 1")
    if found.rank != rank:
        yield
        return
    engine = found.engine_of(runtime.WORLD)
    hurt = _Hurt(engine, kind, number, seconds)
    replacements: dict[str, Callable[..., Any]] = dict.fromkeys(_PATCHED, _refuse)
    replacements["submit"] = hurt.submit
    try:
        vars(engine).update(replacements)  # hides the methods of the class; nothing that others share is touched
        yield
    finally:
        for name in _PATCHED:
            vars(engine).pop(name, None)


def _refuse(*_: Any) -> bool:
    """Say that nothing has been done, so that the caller submits."""
    return False


class _Hurt:
    """Stands before one engine's `submit`."""

    def __init__(self, engine: Engine, kind: Fault, number: int, seconds: float) -> None:
        self._engine, self._kind, self._left, self._seconds = engine, kind, number, seconds
        self._submit = engine.submit
        self._lock = threading.Lock()  # several threads of a rank may submit

    def submit(self, submissions: Sequence[Submission]) -> None:
        with self._lock:
            self._left -= 1
            left = self._left
        if left == 0 or (left < 0 and self._kind == "slow"):
            submissions = self._strike(submissions)
        if submissions:
            self._submit(submissions)

    def _strike(self, submissions: Sequence[Submission]) -> Sequence[Submission]:
        """Do harm, and return what is to be submitted."""
        match self._kind:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()  # the signal may reach another thread first
            case "die_sending":
                self._amid_a_transfer(signal.SIGKILL)
            case "partition":
                self._amid_a_transfer(signal.SIGSTOP)
            case "delay" | "slow":
                time.sleep(self._seconds)
            case "wrong_shape":
                for one in submissions:
                    rows, *rest = one.request.shape or (1,)
                    one.request = one.request._replace(shape=(rows + 1, *rest))
            case "wrong_dtype":
                for one in submissions:
                    other = "int32" if one.request.dtype != "int32" else "float32"
                    one.request = one.request._replace(dtype=other)
            case "never_submit":
                return ()
            case "stuck":
                threading.Event().wait()
            case "raise":
                raise InjectedError(f"submission of {submissions[0].request.name!r} was made to fail")
        return submissions

    def _amid_a_transfer(self, number: signal.Signals) -> None:
        """Send a signal to this process as soon as the next operation runs."""
        before = self._engine.seconds

        def wait_and_send() -> None:
            while self._engine.seconds == before:  # it counts while an operation runs
                time.sleep(_POLL)
            os.kill(os.getpid(), number)

        threading.Thread(target=wait_and_send, daemon=True).start()
