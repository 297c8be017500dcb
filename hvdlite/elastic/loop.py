"""The loop around a training function: what it raises decides whether, and from what state, it is called again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import hvdlite
from hvdlite.elastic.in_place import InPlace
from hvdlite.elastic.link import Link
from hvdlite.errors import CommunicationError, HorovodInternalError, HostsUpdatedInterrupt, StallError
from hvdlite.observe.log import get_logger

_IN_A_ROW = 3  # failures without a commit between; whatever it is, it does not go away by trying again


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function elastic: `train(state, ...)` goes on after failures. A decorator.

        @hvd.elastic.run
        def train(state): ...

    Before each call `state.sync()` gives all ranks the state of rank 0. If an operation fails (HorovodInternalError),
    the state goes back to its last commit, hvdlite starts again, and the function is called again. Of three failures
    without a commit between the first is raised. Other exceptions are not caught.

    Where HVDLITE_ELASTIC_DIR names a folder, commits are on disk too, and the next start of the job, with any number of
    ranks, goes on from the last one. What only such a start can mend, a rank that is gone or stuck, is then raised.

    Raises: what the function does.
    """
    return run_fn(func, _reset)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Return the elastic function; `reset()` stops hvdlite and starts it again. As `run`."""

    calls = itertools.count()  # another start of the job makes the same calls in the same order

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        link = Link.of_this_rank(f"{getattr(func, '__qualname__', 'function')}, call {next(calls)}")
        with link.signals():
            state.linked(link)
            return _keep_calling(functools.partial(func, state, *args, **kwargs), state, reset, link)

    return wrapper


def _keep_calling(train: Callable[[], Any], state: Any, reset: Callable[[], None], link: Link) -> Any:
    failures = _Failures()
    in_place = InPlace.of_this_job()
    is_up, is_restored, is_synced = True, True, False
    while True:
        try:
            if not is_up:
                reset()
                link.renumbered()
                if not is_restored:
                    state.restore()
                    is_restored = True
                state.on_reset()
                is_up = True
            if not is_synced:
                state.sync()
                is_synced = True
            if in_place is not None:
                in_place.settle()
            result = train()
            link.done()
            return result
        except HorovodInternalError as error:
            if in_place is not None and in_place.has_lost(error):
                is_up = is_restored = is_synced = False
                in_place.leave_lost()  # until then others may still write to what this rank has reduced
                continue
            if not is_up:
                raise
            if link.is_restartable and isinstance(error, CommunicationError | StallError):
                raise  # ranks are gone or stuck, and hvdlite would not come up here
            failures.note(error, state)
            get_logger().warning("training goes back to the last commit, after %s: %s", type(error).__name__, error)
            state.restore()
            is_synced = False
        except HostsUpdatedInterrupt as news:
            if link.is_restartable:
                state.leave(news.is_written)
            is_synced = news.skip_sync
        is_up = False


class _Failures:
    """Counts those that no commit separates."""

    def __init__(self) -> None:
        self._in_a_row: list[Exception] = []
        self._n_commits = 0

    def note(self, error: Exception, state: Any) -> None:
        """Raises the first one if this is one too many."""
        if state.n_commits > self._n_commits:
            self._in_a_row.clear()
        self._n_commits = state.n_commits
        self._in_a_row.append(error)
        if len(self._in_a_row) == _IN_A_ROW:
            first = self._in_a_row[0]
            get_logger().error("the %d. failure without a commit between; this was the first", _IN_A_ROW)
            raise first


def _reset() -> None:
    hvdlite.shutdown()
    hvdlite.init()
