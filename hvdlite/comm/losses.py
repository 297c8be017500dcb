"""Ranks that are lost while the job goes on: who notices it, and how long the others may take to go on.

For MPI with fault tolerance (ULFM), where mpirun does not end the job when a rank dies. No MPI is imported here.

A thread of each rank looks for lost ranks. Once there is one, everything that could wait for it has to end: the thread
revokes the communicators of all groups, which ends what is blocked in MPI, and what waits outside MPI calls `check`.
Then the others come to `shrink`, which returns on none of them before all have come: so nobody is still at work
in the memory of another. If training has not gone on within a limit, the whole job ends, and can be started again.

What MPI was given and has not given back by then is kept for ever: to touch a send after a failure aborts
Open MPI (in 30 to 80 % of runs).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.errors import CommunicationError, describe_ranks

_PERIOD = 0.05  # seconds between two looks; each costs about 3 us, 200 once a rank is lost
_LAST_WORDS = 0.3  # seconds that mpirun gets to read them
_ABORT_WAIT = 2.0  # seconds; after a failure MPI may be stuck


class Losses:
    """What one rank knows of lost ranks: one object, whatever groups come and go. Any thread may use it.

    Args:
        base: MPI communicator of all ranks, private to this object, which returns errors.
        limit: seconds from a loss to `settle`, at most. Then `abort` is called.
        abort: ends all ranks with an exit status.

    Attributes:
        noticed: set while a rank of `base` is lost.
        has_happened: some rank was lost at some time.
        text: which are lost, for messages; "" if none is.
    """

    def __init__(self, base: Any, limit: float, abort: Callable[[int], None]) -> None:
        self.base, self._limit, self._abort = base, limit, abort
        self.noticed = threading.Event()
        self.has_happened = False
        self.text = ""
        self._deadline: float | None = None
        self._lock = threading.Lock()
        self._groups: dict[object, tuple[Sequence[Any], Callable[[], None]]] = {}
        self._kept: list[Any] = []

    def start(self) -> None:
        """Begin to look, on a thread."""
        threading.Thread(target=self._main, name="hvdlite losses", daemon=True).start()

    def check(self) -> None:
        """Raise CommunicationError if a rank is lost. Costs next to nothing."""
        if self.text:
            raise CommunicationError(f"{self.text}.")

    def guard(self, owner: object, comms: Sequence[Any], wake: Callable[[], None]) -> None:
        """Revoke `comms` and call `wake` once a rank is lost, or now if one is. Again: with other values."""
        with self._lock:
            self._groups[owner] = comms, wake
            if self.text:
                self._free(owner)

    def release(self, owner: object) -> None:
        """Forget what `guard` was told."""
        with self._lock:
            self._groups.pop(owner, None)

    def keep(self, *things: Any) -> None:
        """Never let go of what MPI may still use."""
        self._kept += things

    def shrink(self) -> None:
        """Make `base` the communicator of those that are left. Collective over them.

        Afterwards none is lost, as far as this knows; groups from before are out of use.
        """
        with self._lock:
            self.keep(self.base, list(self._groups.values()))
            self._groups.clear()
            self.base = self.base.Shrink()
            self.text = ""
            self.noticed.clear()
            self._deadline = time.monotonic() + self._limit

    def settle(self) -> None:
        """Training goes on: nothing is to be done within a limit, unless another rank has been lost by now."""
        with self._lock:
            if not self.text:
                self._deadline = None

    def look(self) -> None:
        """Note which ranks are lost, if there are any, and free those that may wait for them."""
        if not self._lock.acquire(blocking=False):  # most likely in `shrink`, which may last
            return
        try:
            if self.text:
                return
            with contextlib.suppress(Exception):  # of MPI: it may tell of the loss itself
                self.base.Iprobe()  # MPI takes note of failures where it makes progress, and only there
            failed = self.base.Get_failed()
            if not failed.size:
                return
            lost = type(failed).Translate_ranks(failed, None, self.base.Get_group())
            self.text = f"{describe_ranks(lost)} of {self.base.size} died or cannot be reached"
            self.has_happened = True
            self._deadline = time.monotonic() + self._limit
            for owner in self._groups:
                self._free(owner)
            self.noticed.set()
        finally:
            self._lock.release()

    def _free(self, owner: object) -> None:
        comms, wake = self._groups[owner]
        for comm in comms:
            with contextlib.suppress(Exception):  # another rank's revocation came first
                comm.Revoke()
        wake()

    def _main(self) -> None:
        while True:
            time.sleep(_PERIOD)
            self.end_if_late()
            self.look()

    def end_if_late(self) -> None:
        """End the job, and in any case this process, if the limit has passed."""
        deadline = self._deadline
        if deadline is None or time.monotonic() < deadline:
            return
        told = self.text or "a rank was lost"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(
                f"hvdlite: {told}, and training did not go on within {self._limit:g} s: all ranks end now.\n"
            )
            sys.stderr.flush()
        time.sleep(_LAST_WORDS)
        threading.Thread(target=self._abort, args=(1,), daemon=True).start()
        time.sleep(_ABORT_WAIT)
        os.kill(os.getpid(), signal.SIGKILL)
