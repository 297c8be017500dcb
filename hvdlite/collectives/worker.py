"""A thread that does what it is given, one thing after the other, beside the one that gives it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Task:
    """Something under way."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> None:
        """Return when it is done, or raise what it has raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Worker:
    """Starts its thread when it is first needed, and ends it with `close`.

    The thread does not keep the process alive: it may wait for a rank that has died.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> Task:
        """Do `work` after everything submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            self._thread.start()
        task = Task(work)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """End the thread once it has done everything."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _main(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
