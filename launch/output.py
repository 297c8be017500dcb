"""hvdrun's own output while a job runs: what cannot be written is lost, and the job goes on."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence

from .guard import ENDING
from .screen import Piece

_LOOK = 0.1  # seconds between two looks at whether hvdrun is to end
_REST = 1.0  # seconds for a reader to read, when it is


class Output:
    """Standard output and error.

    Args:
        received: the signals that hvdrun has got; told to end, it does not wait for a reader any more.
    """

    def __init__(self, received: Sequence[int]) -> None:
        self._received = received
        self._stuck: set[str] = set()  # streams that nobody reads, and hvdrun is to end
        self._lost: set[str] = set()  # streams that could not be written

    def say(self, text: str) -> None:
        """Write what hvdrun says itself."""
        self.write([("e", text.encode())] if text else [])

    def line(self, words: str) -> None:
        """Write a line of hvdrun's own."""
        self.say(f"hvdrun: {words}\n")

    def write(self, pieces: Sequence[Piece]) -> None:
        for stream, text in pieces:
            rest, fd = text, 1 if stream == "o" else 2
            try:
                while rest and stream not in self._stuck:
                    self._wait_for_room(fd)
                    with contextlib.suppress(BlockingIOError):  # somebody made it so that shares it with us
                        rest = rest[os.write(fd, rest[: select.PIPE_BUF]) :]
            except TimeoutError:
                self._stuck.add(stream)
            except OSError as error:  # nobody reads it, it is closed, or its disk is full; the job goes on
                self._note_loss(stream, error)

    def _wait_for_room(self, fd: int) -> None:
        """Wait until a pipe takes a piece. Raises TimeoutError if it does not, and hvdrun was told to end."""
        until = float("inf")
        while not select.select([], [fd], [], _LOOK)[1]:
            if until == float("inf") and any(number in ENDING for number in self._received):
                until = time.monotonic() + _REST
            if time.monotonic() > until:
                raise TimeoutError

    def _note_loss(self, stream: str, error: OSError) -> None:
        """Say once that what ranks write does not arrive. Nothing where the reader has had enough, as `head` has."""
        if stream in self._lost:
            return
        self._lost.add(stream)
        if not isinstance(error, BrokenPipeError):
            what = "standard output" if stream == "o" else "standard error"
            words = f"hvdrun: cannot write to {what}, so some of it is lost, and the job goes on: {error.strerror}\n"
            self.write([("e", words.encode())])
