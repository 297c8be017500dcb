"""The timeline: what the engines of this process did when, in a file that a trace viewer shows.

An engine only puts a small tuple into a queue. A thread turns these into text and writes it, twenty times a
second (docs/decisions/0009-timeline.md).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from hvdlite.config import Config
from hvdlite.messages import Request, Response
from hvdlite.observe.instrument import Instrument, Operation
from hvdlite.observe.log import get_logger
from hvdlite.observe.trace import Place, Trace
from hvdlite.observe.trace_file import TraceFile

_PERIOD = 0.05  # seconds between two writes
_ROOM = 2**16  # reports that wait to be written; what a disc that hangs can cost is some 20 MB
_AT_ONCE = 100  # events per write: about 0.1 ms of the interpreter, then the engine has its turn
_PATIENCE = 5.0  # seconds that stopping waits for a disc that hangs
_RANK = "{rank}"
_DYNAMIC = "DYNAMIC"  # Horovod's word for "nothing yet"


class Recording:
    """One file that is being written. Any thread may `add`; a thread of its own does the rest."""

    def __init__(self, path: str, rank: int, mark_cycles: bool) -> None:
        self.path, self.mark_cycles = path, mark_cycles
        self._trace = Trace(time.perf_counter(), time.time_ns() // 1000, rank)
        self._queue: deque[tuple[Any, ...]] = deque()  # a method of Trace and its arguments
        self._room, self._n_dropped, self._warned = _ROOM, 0, False
        self._wake = threading.Event()
        self._waiting: deque[threading.Event] = deque()  # of callers of `flush`
        self._closing = False
        self._writer = threading.Thread(target=self._main, name="timeline writer", daemon=True)
        self._writer.start()

    def add(self, *report: Any) -> None:
        """Note a report. Never blocks: what there is no room for is counted and dropped."""
        if len(self._queue) < self._room:
            self._queue.append(report)
        else:
            self._n_dropped += 1

    def flush(self) -> None:
        """Wait until everything that was added before is in the file; not for ever, nor after an error."""
        if not self.is_alive:  # also in a child made by fork, whose locks may be held for ever
            return
        done = threading.Event()
        self._waiting.append(done)
        self._wake.set()
        deadline = time.monotonic() + _PATIENCE
        while self.is_alive and not done.wait(_PERIOD):
            if time.monotonic() > deadline:
                get_logger().warning("timeline %r: could not be written for %g s; its end may be missing.",
                                     self.path, _PATIENCE)  # fmt: skip
                return

    @property
    def is_alive(self) -> bool:
        """False after an error, or the end."""
        return self._writer.is_alive()

    def close(self) -> None:
        """Write the rest, and end the file."""
        self._closing = True
        self.flush()

    def _main(self) -> None:
        try:
            file = TraceFile(self.path)
            try:
                self._write_until_closed(file)
            finally:
                file.close()
        except OSError as error:
            get_logger().warning("timeline %r: %s; nothing more is recorded, and training goes on.", self.path, error)
        finally:
            self._room = 0
            self._queue.clear()
            self._tell_waiting(len(self._waiting))

    def _write_until_closed(self, file: TraceFile) -> None:
        file.append(self._trace.take())
        closing = False
        while not closing:
            self._wake.wait(_PERIOD)
            self._wake.clear()
            closing, n_waiting, n_reports = self._closing, len(self._waiting), len(self._queue)
            for _ in range(n_reports):
                tell, *arguments = self._queue.popleft()
                tell(self._trace, *arguments)
                if len(self._trace.lines) >= _AT_ONCE:
                    file.append(self._trace.take())
            self._note_dropped()
            if closing:
                self._trace.finish(time.perf_counter())
            file.append(self._trace.take())
            if not closing:  # else when the file is closed
                self._tell_waiting(n_waiting)

    def _note_dropped(self) -> None:
        n, self._n_dropped = self._n_dropped, 0
        if not n:
            return
        self._trace.dropped(time.perf_counter(), n)
        if not self._warned:
            self._warned = True
            get_logger().warning("timeline %r: the disc is too slow; what does not fit is dropped.", self.path)

    def _tell_waiting(self, n: int) -> None:
        for _ in range(n):
            self._waiting.popleft().set()


class Timeline:
    """What this process records, over all its process sets, from one `init()` to the next too.

    Rank 0 writes the file; where its name contains `{rank}`, every rank writes one.
    """

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self._lock = threading.Lock()
        self._wish: tuple[str, bool] | None = None
        self._rank = -1

    def attach(self, rank: int, config: Config) -> None:
        """hvdlite starts, and this process is `rank`. Only the first time the settings count."""
        with self._lock:
            if self._rank < 0 and config.timeline not in ("", _DYNAMIC):
                self._wish = os.path.abspath(config.timeline), config.timeline_mark_cycles
            known, self._rank = self._rank, rank
            if self.recording is None or rank != known:  # else it goes on; or it has failed, and has said so
                self._follow_wish()

    def start(self, path: str, mark_cycles: bool) -> None:
        """Record into `path` from now on; a file that was being written is ended first."""
        with self._lock:
            self._wish = os.path.abspath(path), mark_cycles
            self._follow_wish()

    def stop(self) -> None:
        """End the file. What ran before is in it."""
        if self._wish is None:
            get_logger().info("hvd.stop_timeline(): no timeline is being recorded.")
        self.close()

    def close(self) -> None:
        """End the file if there is one."""
        with self._lock:
            self._wish = None
            self._follow_wish()

    def flush(self) -> None:
        """Wait until the file has what ran before."""
        with self._lock:
            if self.recording is not None:
                self.recording.flush()

    def waited(self, since: float, until: float) -> None:
        """Note that callers waited, between two moments. From any thread."""
        recording = self.recording
        if recording is not None:
            recording.add(Trace.waited, until, since)

    def ear_of(self, label: str, members: Sequence[int], set_rank: int, rest: Instrument) -> Instrument:
        """Return the ear for one process set. It passes on to `rest` what runs."""
        return _Ear(self, Place(label, tuple(members), set_rank), rest)

    def _follow_wish(self) -> None:
        path, mark_cycles = self._wish or ("", False)
        path = path.replace(_RANK, str(self._rank)) if _RANK in path or self._rank == 0 else ""
        old = self.recording
        if old is not None and old.path == path and old.is_alive:
            old.mark_cycles = mark_cycles
            return
        self.recording = None
        if old is not None:
            old.close()
        if path:
            self.recording = Recording(path, self._rank, mark_cycles)


class _Ear(Instrument):
    """Says whether the timeline records before it does anything: that is its cost while nothing is recorded."""

    def __init__(self, timeline: Timeline, place: Place, rest: Instrument) -> None:
        self._timeline, self._place, self._rest = timeline, place, rest

    def heard(self, set_rank: int, requests: Sequence[Request]) -> None:
        recording = self._timeline.recording
        if recording is not None:
            recording.add(Trace.heard, time.perf_counter(), self._place, set_rank, requests)

    def answered(self, responses: Sequence[Response]) -> None:
        recording = self._timeline.recording
        if recording is not None:
            recording.add(Trace.answered, time.perf_counter(), self._place, responses, recording.mark_cycles)

    def began(self, responses: Sequence[Response]) -> None:
        self._rest.began(responses)
        recording = self._timeline.recording
        if recording is not None:
            recording.add(Trace.began, time.perf_counter(), self._place, responses)

    def activity(self, name: str) -> None:
        recording = self._timeline.recording
        if recording is not None:
            recording.add(Trace.activity, time.perf_counter(), self._place, name)

    def operation(self, operation: Operation) -> None:
        self._rest.operation(operation)
        recording = self._timeline.recording
        if recording is not None:
            recording.add(Trace.ran, time.perf_counter(), self._place, operation)

    def ended(self) -> None:
        self._rest.ended()
        recording = self._timeline.recording
        if recording is not None:
            recording.add(Trace.ended, time.perf_counter(), self._place)
