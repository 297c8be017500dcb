"""A JSON array on disc that is complete after every write: what Chrome's trace viewer and Perfetto read.

Each write puts new events over the closing bracket, and a new bracket behind them, in one call. So a
process that is killed leaves a valid file, except within the microseconds of a write.
A pipe or terminal cannot be written over: there the bracket comes at the end, and is missing if the
process is killed. The viewers read that, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

_END = b"\n]\n"


class TraceFile:
    """Makes `path`, or empties it. Everything here raises `OSError`, and may take as long as the disc does."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._end = 0  # where the closing bracket stands
        try:
            os.lseek(self._fd, 0, os.SEEK_CUR)
            self._seekable = True
        except OSError:
            self._seekable = False

    def append(self, events: Sequence[str]) -> None:
        """Add events, each a JSON value. When the disc is full, the file stays as it was."""
        if not events:
            return
        text = ((",\n" if self._end else "[\n") + ",\n".join(events)).encode()
        if not self._seekable:
            self._write(text)
        else:
            try:
                self._write(text + _END)
            except OSError:
                self._take_back()
                raise
        self._end += len(text)

    def close(self) -> None:
        """Finish the array where that is still to be done, and let go of the file."""
        try:
            if not self._seekable and self._end:
                self._write(_END)
        finally:
            os.close(self._fd)

    def _write(self, text: bytes) -> None:
        left, at = memoryview(text), self._end
        while left:
            n = os.pwrite(self._fd, left, at) if self._seekable else os.write(self._fd, left)
            left, at = left[n:], at + n

    def _take_back(self) -> None:
        """Put the bracket where it was; its place on the disc is ours already."""
        with contextlib.suppress(OSError):
            if self._end:
                os.pwrite(self._fd, _END, self._end)
            os.ftruncate(self._fd, self._end + len(_END) if self._end else 0)
