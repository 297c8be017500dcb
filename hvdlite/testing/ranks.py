"""Ranks as threads: run one function on every rank of a loopback group, and never hang."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdlite.comm.loopback import LoopbackCommunicator, loopback_group
from hvdlite.errors import describe_ranks

Result = TypeVar("Result")
Setup = Callable[[LoopbackCommunicator], contextlib.AbstractContextManager[Any]]

_LAST_WORDS = 5.0  # seconds that aborted ranks get to end before they are left behind


class RanksHangError(AssertionError):
    """Some ranks had not returned when the time was up. The message has the stacks of all threads."""


def run_ranks(
    size: int,
    body: Callable[[LoopbackCommunicator], Result],
    hosts: Sequence[str] | None = None,
    timeout: float = 30.0,
    setup: Setup | None = None,
) -> list[Result]:
    """Run `body(comm)` on `size` threads, one for each rank, and return the results in rank order.

    When a rank raises, the others are aborted (their calls raise `CommunicationError`) and the first
    exception is raised here, with a note that names the rank.

    Args:
        hosts: host name of each rank, to pretend that there are several.
        timeout: seconds after which ranks that still run are aborted, and `RanksHangError` is raised.
        setup: makes a context that is entered on each rank's thread around `body`.
    """
    failures: list[tuple[int, BaseException]] = []  # in the order of time
    results: dict[int, Result] = {}

    def run(comm: LoopbackCommunicator) -> None:
        try:
            with setup(comm) if setup is not None else contextlib.nullcontext():
                results[comm.rank] = body(comm)
        except BaseException as error:  # pytest's outcomes and SystemExit too: nothing may be lost
            failures.append((comm.rank, error))
            comm.abort(1)

    comms = loopback_group(size, hosts)
    threads = [threading.Thread(target=run, args=(comm,), name=f"rank {comm.rank}", daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    try:
        _join(threads, timeout)
    except BaseException:  # an interrupt
        comms[0].abort(1)
        raise
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if hanging and not failures:
        stacks = _stacks(threads)
        comms[0].abort(1)
        _join(threads, _LAST_WORDS)
        raise RanksHangError(f"{describe_ranks(hanging)} of {size} still ran after {timeout} s:\n{stacks}")
    if failures:
        rank, error = failures[0]
        raise _with_note(error, f"raised on rank {rank} of {size}")
    return [results[rank] for rank in range(size)]


def _join(threads: Sequence[threading.Thread], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _stacks(threads: Sequence[threading.Thread]) -> str:
    """Return the stacks of all threads of the process, ranks first."""
    names = {thread.ident: thread.name for thread in [*threads, *threading.enumerate()]}
    ranks = [thread.ident for thread in threads]
    frames = sys._current_frames()
    ordered = sorted(frames, key=lambda ident: (ident not in ranks, str(names.get(ident))))
    return "\n".join(f"{names.get(i, i)}:\n{''.join(traceback.format_stack(frames[i]))}" for i in ordered)


def _with_note(error: BaseException, note: str) -> BaseException:
    # What add_note() does, which Python 3.10 does not have yet; pytest prints it there as well.
    error.__notes__ = [*getattr(error, "__notes__", []), note]
    return error
