"""What is typed or piped into hvdrun, on its way to rank 0. The other end is in `launch/runner.py`.

It travels through the launcher's standard input in packets, one a line:

    RS number crc32 base64 LF     the number counts from 0; no data is the end of the input

Open MPI 5.0.11's mpirun never tells rank 0 that the input has ended, and is known to hand on pieces of more than 64 KB
several times (github.com/openpmix/prrte/issues/2579). So the end is a packet, and what is there already is left out.
Where rank 0 is on another host, it loses all pieces that fill a read of 4096 bytes. MPICH's proxy gives up the whole
job when a rank does not read fast enough ("can't keep up"). So the runner tells what the program has taken, and only
then the next packet leaves.
"""

from __future__ import annotations

import binascii
import contextlib
import os
import select
import sys
import threading
import time

_PIECE = 2997  # bytes: a packet stays below 4096
_LOOK = 0.2  # seconds between two looks at whether this process may read from its terminal


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
        self._is_over = False

    def start(self) -> None:
        threading.Thread(target=self._copy, daemon=True).start()

    def stop(self) -> None:
        """Take nothing more of the standard input: the launcher has ended."""
        self._is_over = True
        self._room.release()

    def taken(self, packets: int) -> None:
        """Take notice that the program has taken so many more."""
        self._room.release(packets)

    def _copy(self) -> None:
        number = 0
        with contextlib.suppress(OSError):  # the launcher has ended
            while self._room.acquire() and not self._is_over and (data := self._next()):
                os.write(self._target, packet(number, data))
                number += 1
            if not self._is_over:
                os.write(self._target, packet(number, b""))
        os.close(self._target)

    def _next(self) -> bytes:
        """Return the next piece, empty at the end. A job in the background waits: reading would stop it (SIGTTIN)."""
        source = self._source
        try:
            while source is not None and not self._is_over:
                if os.isatty(source) and os.tcgetpgrp(source) != os.getpgrp():
                    time.sleep(_LOOK)
                elif select.select([source], [], [], _LOOK)[0]:
                    return os.read(source, _PIECE)
        except OSError:  # a terminal that is gone, or a folder
            pass
        return b""
