"""What is typed or piped into hvdrun, on its way to rank 0. The other end is in `launch/runner.py`.

It travels through the launcher's standard input in packets, one a line:

    RS number crc32 base64 LF     the number counts from 0; no data is the end of the input

Open MPI 5.0.11's mpirun never tells rank 0 that the input has ended, and is known to hand on pieces of more than 64 KB
several times (github.com/openpmix/prrte/issues/2579). So the end is a packet, and what is there already is left out.
Where rank 0 is on another host, it loses all pieces that fill a read of 4096 bytes. MPICH's proxy gives up the whole
job when a rank does not read fast enough ("can't keep up"). So the runner tells what the program has taken, and only
then the next packet leaves. It gives up the job as well when something arrives for a rank 0 that has ended. So the end
is sent when rank 0 tells that its program has ended, if not before, and there the runner waits for it.
"""

from __future__ import annotations

import binascii
import contextlib
import os
import select
import sys
import threading

_PIECE = 2997  # bytes: a packet stays below 4096
_LOOK = 0.2  # seconds between two looks at whether this process may read from its terminal
_REST = 1.0  # seconds for the thread to end, which waits for nothing by then


def packet(number: int, data: bytes) -> bytes:
    """Return a piece of the input; without data, its end."""
    return b"\x1e%d %08x %s" % (number, binascii.crc32(data), binascii.b2a_base64(data))


class Feed:
    """Hands the standard input to the launcher's, `target`, until either ends, in a thread of its own.

    Args:
        reads: False: there is no input, and that is told at once.
    """

    def __init__(self, target: int, reads: bool = True) -> None:
        # Closed: by now 0 may be a file of our own.
        self._source = 0 if reads and sys.stdin is not None else None
        self._target = os.dup(target)  # our own: its number is not given to another launcher's while we write
        self._room = threading.Semaphore(1)
        self._awake = os.eventfd(0)
        self._is_over = False  # the program of rank 0 has ended: only the end is sent
        self._is_closed = False  # the launcher has ended: nothing is sent
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Take notice that the program has ended: send the end, and nothing else."""
        self._is_over = True
        os.eventfd_write(self._awake, 1)
        self._room.release()

    def close(self) -> None:
        """Take nothing more of the standard input, for the launcher has ended. Another one may get the rest."""
        self._is_closed = True
        self.end()
        self._thread.join(_REST)
        if not self._thread.is_alive():  # somebody else may have read what it waits for
            os.close(self._awake)
            os.close(self._target)

    def taken(self, packets: int) -> None:
        """Take notice that the program has taken so many more."""
        self._room.release(packets)

    def _copy(self) -> None:
        number = 0
        with contextlib.suppress(OSError):  # the launcher has ended
            while self._room.acquire() and (data := self._next()):
                os.write(self._target, packet(number, data))
                number += 1
            if not self._is_closed:
                os.write(self._target, packet(number, b""))

    def _next(self) -> bytes:
        """Return the next piece, empty at the end. A job in the background waits: reading would stop it (SIGTTIN)."""
        source = self._source
        try:
            while source is not None and not self._is_over:
                if os.isatty(source) and os.tcgetpgrp(source) != os.getpgrp():
                    select.select([self._awake], [], [], _LOOK)
                elif source in select.select([source, self._awake], [], [])[0]:
                    return b"" if self._is_over else os.read(source, _PIECE)
        except OSError:  # a terminal that is gone, or a folder
            pass
        return b""
