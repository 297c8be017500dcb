"""The caller's end of a submitted operation."""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from typing import Any, Protocol

from hvdlite.observe.instrument import WaitClock

_NOTHING: Any = object()


class Driver(Protocol):
    """What gets an operation done: the engine.

    Attributes:
        waits: measures how long callers wait.
    """

    waits: WaitClock

    def drive(self, done: Callable[[], bool], timeout: float | None) -> None:
        """Work on this thread until `done()`, unless another thread is at it already."""

    def alert(self) -> None:
        """Let the engine's own thread work."""


class Handle:
    """Done?, wait, result or exception. Any thread may ask, any number of times.

    Args:
        name: of the tensor.
        convert: turns what the engine leaves into what the caller gets; called once, by the first waiter.
        driver: lent the thread that waits. None: somebody else sees to the operation.

    Attributes:
        awaited: some thread waits, or has waited, for it.
    """

    __slots__ = ("_convert", "_done", "_driver", "_error", "_finished", "_raw", "_result", "awaited", "name")

    def __init__(self, name: str, convert: Callable[[Any], Any] | None = None, driver: Driver | None = None) -> None:
        self.name = name
        self.awaited = False
        self._convert, self._driver = convert, driver
        self._done = _thread.allocate_lock()  # held until done: the cheapest event there is (0.1 us)
        self._done.acquire()
        self._finished = False  # stays True; a waiter may hold the lock for a moment
        self._error: BaseException | None = None
        self._raw: Any = None
        self._result: Any = _NOTHING

    def poll(self) -> bool:
        """Return True once the operation is over, so that `wait` returns or raises at once."""
        return self._finished

    def alert(self) -> None:
        """The caller has other things to do than to wait: let the engine's thread work on this."""
        if self._driver is not None:
            self._driver.alert()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result, or raise what the operation ended with.

        Args:
            timeout: seconds; None waits for ever. `TimeoutError` when it is over, and the operation goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        driver = self._driver
        if driver is not None and not self._finished:
            self.awaited = True
            driver.waits.begin()
            try:
                driver.drive(self.poll, timeout)
                self._acquire(deadline, timeout)
            finally:
                driver.waits.end()
        else:
            self._acquire(deadline, timeout)
        try:  # the lock is kept until there is a result, so that a second waiter does not convert again
            if self._error is None and self._result is _NOTHING:
                self._settle()
        finally:
            self._done.release()
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self, raw: Any = None) -> None:
        """The engine is done. Called once."""
        self._raw = raw
        self._finished = True
        self._done.release()

    def fail(self, error: BaseException) -> None:
        """The engine has given up. Called once."""
        self._error = error
        self._finished = True
        self._done.release()

    def _acquire(self, deadline: float | None, timeout: float | None) -> None:
        if not self._done.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"tensor {self.name!r} is not done after {timeout} s; it is still under way.")

    def _settle(self) -> None:
        try:
            self._result = self._raw if self._convert is None else self._convert(self._raw)
        except Exception as error:
            self._error = error
        self._raw = self._convert = self._driver = None


class GroupHandle:
    """One handle for operations that were submitted together; the result is the list of theirs."""

    def __init__(self, handles: list[Handle], convert: Callable[[list[Any]], Any] = list) -> None:
        self._handles, self._convert = handles, convert

    def poll(self) -> bool:
        return all(handle.poll() for handle in self._handles)

    def alert(self) -> None:
        self._handles[0].alert()  # one engine serves all of them

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for all, also when one fails, so that nothing of the group is in flight afterwards."""
        deadline = None if timeout is None else time.monotonic() + timeout
        first_error: Exception | None = None
        results = []
        for handle in self._handles:
            try:
                results.append(handle.wait(None if deadline is None else max(0.0, deadline - time.monotonic())))
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return self._convert(results)
