"""Waking a rank of the same host: a named pipe to sleep on, and flags that say when a write to it is needed.

A sleeper costs no CPU, and ringing a rank that is awake costs no system call. Each rank of a group has two bells,
because two of its threads may sleep at once: *control* ends `Communicator.wait`, *data* ends the wait for a
flag of a shared segment.

A process holds two file descriptors for each rank of its host and one more, for each group.

Measured on Linux 6 (two processes, idle cores): pipe wake-up 8 us one way; ring of a rank that is awake 0.2 us.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hvdlite.errors import CommunicationError, describe_ranks

_CONTROL, _DATA = 0, 1
_STRIDE = 16  # int64 words per rank: two cache lines, because processors fetch lines in pairs
_WAITING, _RUNG, _AWAITED = 0, 1, 8  # words of a rank; the last one sits in its own line
_LONGEST_POLL = 60.0  # seconds; poll() takes milliseconds in a C int
STRONG_ORDER = frozenset({"x86_64", "AMD64", "i386", "i686"})  # machines whose stores are seen in their order
_SHORTEST_POLL = 0.001  # seconds; poll() rounds up to milliseconds, so shorter naps use sleep()


class Doorbells(Protocol):
    """The bells of the ranks of a group on one host, as one of them sees them. Ranks are numbered within the host."""

    rank: int
    size: int

    def ring(self, rank: int) -> None:
        """End the current or the next `wait` of `rank`. From any thread; never blocks."""

    def wait(self, timeout: float, eager: bool = False) -> bool:
        """Sleep until this rank's bell rings or `timeout` seconds passed; may return early.

        Returns:
            True if it rang since the last `wait` that returned True.
        """

    def nudge(self, rank: int) -> None:
        """End `sleep_for` of `rank` if it sleeps for this rank."""

    def sleep_for(self, rank: int, ready: Callable[[], bool], timeout: float) -> None:
        """Sleep until `rank` nudges this one, unless `ready()`. May return early."""


class Fence:
    """A full memory fence: no load after it runs ahead of a store before it, on any processor.

    Taking and releasing a lock is an atomic read-modify-write, which is a full fence on x86 and at
    least orders both sides on ARM and POWER. What is left of a race there is bounded by the time limits of
    the sleepers.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            pass


class Spinner:
    """Watches a word of shared memory for a short time, and less often where that proves useless.

    Spinning saves the 8 us of a wake-up when the other side is quick and has a core of its own. When it shares
    ours, spinning keeps it from running (measured: a barrier of 2 ranks on one core takes 85 us
    with spins of 40 us and 23 us without). So every spin in vain doubles the number of waits that
    sleep at once, up to 63, and one that helped ends that.

    Where ranks outnumber cores, each turn yields the core: it goes to a rank that works, at the price of a switch
    without the wake-up (barrier of 4 ranks on 2 cores: 87 us with sleeps, 20 with yields). That takes nothing from
    others, so it is not given up (4 MiB: 2.3 to 3.7 ms, 3.3 to 4.5 if it is). The turns are few, so that a core
    with nothing else to run falls idle, and the system moves a rank there that waits for another core.

    Args:
        seconds: of this rank's own time to spend on a wait.
        crowded: ranks outnumber cores.
    """

    _TURN = 35e-9  # seconds that one turn of the loop takes, about
    _YIELDING_TURN = 500e-9  # where nobody else wants the core

    def __init__(self, seconds: float, crowded: bool = False) -> None:
        self._turns = range(int(seconds / (self._YIELDING_TURN if crowded else self._TURN)))
        self._most_skipped = 0 if crowded else 63
        self._crowded = crowded
        self._skip = self._failures = 0

    def sees(self, words: memoryview[int], at: int, value: int) -> bool:
        """True as soon as `words[at] >= value`; False when it is better to sleep now."""
        if self._skip:
            self._skip -= 1
            return words[at] >= value
        for _ in self._turns:
            if words[at] >= value:
                self._failures = 0
                return True
            if self._crowded:
                os.sched_yield()
        self._skip = self._failures = min(2 * self._failures + 1, self._most_skipped)
        return words[at] >= value


class FifoDoorbells:
    """`Doorbells` between processes. Made by `open_doorbells`."""

    def __init__(self, rank: int, fifos: Sequence[tuple[int, int]], page: mmap.mmap, spinner: Spinner) -> None:
        self.rank, self.size = rank, len(fifos)
        self._spinner = spinner
        self._fifos = fifos
        self._words = memoryview(page).cast("q")
        self._base = rank * _STRIDE
        self._fence = Fence()
        self._closing = threading.Lock()
        self._pollers = [select.poll() for _ in (_CONTROL, _DATA)]
        for poller, fd in zip(self._pollers, fifos[rank], strict=True):
            poller.register(fd, select.POLLIN)

    def ring(self, rank: int) -> None:
        words, base = self._words, rank * _STRIDE
        words[base + _RUNG] = 1
        self._fence()
        if words[base + _WAITING]:
            self._write(rank, _CONTROL)

    def wait(self, timeout: float, eager: bool = False) -> bool:
        words, rung, waiting = self._words, self._base + _RUNG, self._base + _WAITING
        seen = self._spinner.sees(words, rung, 1) if eager else words[rung]
        if not seen and timeout > 0:
            words[waiting] = 1
            self._fence()
            if not words[rung]:
                self._doze(_CONTROL, timeout)
            words[waiting] = 0
        if not words[rung]:
            return False
        words[rung] = 0  # only after it was seen: clearing blindly could lose a ring
        self._fence()  # and before the caller looks for what it announced
        return True

    def nudge(self, rank: int) -> None:
        # The caller has published its flag and passed a fence.
        if self._words[rank * _STRIDE + _AWAITED] == self.rank + 1:
            self._write(rank, _DATA)

    def sleep_for(self, rank: int, ready: Callable[[], bool], timeout: float) -> None:
        awaited = self._base + _AWAITED
        self._words[awaited] = rank + 1
        self._fence()
        if not ready():
            self._doze(_DATA, timeout)
        self._words[awaited] = 0

    def close(self) -> None:
        """Give the pipes back. A late `ring` of this rank, by another thread of it, stays harmless."""
        self._words = memoryview(bytearray(self.size * _STRIDE * 8)).cast("q")
        with self._closing:
            fifos, self._fifos = self._fifos, ()
        for fd in (fd for pair in fifos for fd in pair):
            os.close(fd)

    def _write(self, rank: int, bell: int) -> None:
        with self._closing, contextlib.suppress(BlockingIOError):  # full: it has plenty to wake up for
            if self._fifos:
                os.write(self._fifos[rank][bell], b"!")

    def _doze(self, bell: int, timeout: float) -> None:
        if timeout < _SHORTEST_POLL:
            time.sleep(timeout)
        elif self._pollers[bell].poll(min(timeout, _LONGEST_POLL) * 1000):
            with contextlib.suppress(BlockingIOError):
                os.read(self._fifos[self.rank][bell], 4096)


class ThreadDoorbells:
    """`Doorbells` between threads of one process: a lock that is released is a bell that rang."""

    def __init__(self, rank: int, bells: Sequence[tuple[threading.Lock, threading.Lock]]) -> None:
        self.rank, self.size = rank, len(bells)
        self._bells = bells

    @staticmethod
    def group(size: int) -> list[ThreadDoorbells]:
        """Return the doorbells of `size` threads, in rank order."""
        bells = [(threading.Lock(), threading.Lock()) for _ in range(size)]
        for lock in (lock for pair in bells for lock in pair):
            lock.acquire()
        return [ThreadDoorbells(rank, bells) for rank in range(size)]

    def ring(self, rank: int) -> None:
        self._release(rank, _CONTROL)

    def wait(self, timeout: float, eager: bool = False) -> bool:
        return self._acquire(_CONTROL, timeout)

    def nudge(self, rank: int) -> None:
        self._release(rank, _DATA)

    def sleep_for(self, rank: int, ready: Callable[[], bool], timeout: float) -> None:
        if not ready():
            self._acquire(_DATA, timeout)

    def _release(self, rank: int, bell: int) -> None:
        lock = self._bells[rank][bell]
        if lock.locked():
            with contextlib.suppress(RuntimeError):  # another thread released it in between
                lock.release()

    def _acquire(self, bell: int, timeout: float) -> bool:
        return self._bells[self.rank][bell].acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX))


def open_doorbells(
    local_ranks: Sequence[int],
    rank: int,
    exchange: Callable[[bytes], list[bytes]],
    directories: Sequence[str] = (),
    spin: float = 0.0,
    crowded: bool = False,
) -> FifoDoorbells:
    """Return the doorbells between this process and the others of its host. Collective over all hosts.

    The first rank of each host makes the pipes in a directory that only this user can enter; all open them,
    and then the names are removed, so that nothing is left whatever happens to the processes later.

    Args:
        local_ranks: ranks on this host, ascending; `rank` is this one.
        exchange: returns every rank's bytes, in rank order (`Communicator.allgather_bytes`).
        directories: where to try first; after them the system's temporary directory.
        spin: seconds that an eager `wait` spins before it sleeps.
        crowded: ranks outnumber cores here.
    """
    made, problem = _make_place(len(local_ranks), directories) if rank == local_ranks[0] else ("", "")
    bells = None
    try:
        places = [text.decode() for text in exchange(f"{made}\n{problem}".encode())]
        place, problem = places[local_ranks[0]].split("\n", 1)
        try:
            if not problem:
                bells = _open_place(place, local_ranks.index(rank), len(local_ranks), Spinner(spin, crowded))
        except OSError as error:
            problem = f"cannot open the pipes that rank {local_ranks[0]} made in {place!r}: {error}"
        problems = [text.decode() for text in exchange(problem.encode())]
    finally:
        if made:
            _remove_place(made)
    if bells is None or any(problems):
        if bells is not None:
            bells.close()
        raise _cannot_wake(problems)
    return bells


def _cannot_wake(problems: Sequence[str]) -> CommunicationError:
    failed = [rank for rank, text in enumerate(problems) if text]
    return CommunicationError(
        f"ranks of one host cannot wake each other: {problems[failed[0]]} (on {describe_ranks(failed)}). "
        "Set TMPDIR to a writable directory that all ranks of a host see, and give different hosts different names."
    )


def _make_place(n_ranks: int, directories: Sequence[str]) -> tuple[str, str]:
    """Return the new directory with pipes and page, and "", or "" and why there is none."""
    problem = ""
    for directory in [*directories, tempfile.gettempdir()]:
        place = ""
        try:
            place = tempfile.mkdtemp(prefix=f"hvdlite-{os.getpid()}-", dir=directory)  # mode 0700
            with open(os.path.join(place, "page"), "wb") as page:
                os.posix_fallocate(page.fileno(), 0, _page_bytes(n_ranks))
            for path in _fifo_paths(place, n_ranks):
                os.mkfifo(path, 0o600)
            return place, ""
        except OSError as error:
            problem = f"cannot make pipes in {directory!r}: {error}"
            if place:
                _remove_place(place)
    return "", problem.replace("\n", " ")


def _open_place(place: str, rank: int, n_ranks: int, spinner: Spinner) -> FifoDoorbells:
    page_path = os.path.join(place, "page")
    fd = os.open(page_path, os.O_RDWR)
    try:
        page = mmap.mmap(fd, _page_bytes(n_ranks))
    finally:
        os.close(fd)
    opened: list[int] = []
    try:
        # O_RDWR: opening blocks on nobody, and there is no end-of-file when a peer dies.
        opened.extend(os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in _fifo_paths(place, n_ranks))
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    return FifoDoorbells(rank, list(zip(opened[0::2], opened[1::2], strict=True)), page, spinner)


def _remove_place(place: str) -> None:
    with contextlib.suppress(OSError):  # a race with a cleaner of old files is no reason to fail
        for path in Path(place).iterdir():
            path.unlink()
        os.rmdir(place)


def _fifo_paths(place: str, n_ranks: int) -> list[str]:
    return [os.path.join(place, f"{rank}.{bell}") for rank in range(n_ranks) for bell in (_CONTROL, _DATA)]


def _page_bytes(n_ranks: int) -> int:
    return math.ceil(n_ranks * _STRIDE * 8 / mmap.PAGESIZE) * mmap.PAGESIZE
