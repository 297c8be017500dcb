"""How hvdrun shows what ranks write: whole lines with the rank in front, and a progress bar as it is drawn.

Pieces in, pieces out: nothing is written here, and the time is passed in. A line is shown when it is complete. On a
terminal what the lowest rank has begun is shown at the bottom meanwhile, and drawn anew after lines of others. In a
file, a bar that is redrawn for long without a newline is shown every now and then.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_LONGEST = 2**20  # bytes of a line that are held back at most
_REDRAWN = 10.0  # seconds after which a file gets what a bar has shown so far
_TAIL = 20  # lines of a rank that are kept
_ERASE = b"\r\x1b[K"
_PLAIN = b"\x1b[0m"
_PARTS = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]|.", re.DOTALL)

Piece = tuple[str, bytes]  # stream ("o" or "e") and what to write there


@dataclass(frozen=True)
class Style:
    """What hvdrun's own output is, and what stands in front of lines.

    Attributes:
        label: the rank in front of each line.
        stamped: the time in front of each line.
        columns: width of the terminals among the streams "o" and "e".
    """

    label: bool = True
    stamped: bool = False
    columns: dict[str, int] = field(default_factory=dict)


@dataclass
class _Source:
    """One stream of one rank."""

    begun: bytes = b""
    since: float = 0.0


class Screen:
    """The state of hvdrun's output. `heard(rank, line)` is called for each line that a rank has completed."""

    def __init__(
        self, style: Style, heard: Callable[[int, bytes], None] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._style, self._heard, self._clock = style, heard, clock
        self._sources: dict[tuple[int, str], _Source] = {}
        self._tails: dict[int, deque[bytes]] = {}
        self._shown: Piece | None = None

    def feed(self, rank: int, stream: str, data: bytes) -> list[Piece]:
        """Return what to write now that a rank has written `data`."""
        source = self._sources.setdefault((rank, stream), _Source())
        if not source.begun:
            source.since = self._clock()
        *lines, source.begun = (source.begun + data).split(b"\n") if b"\n" in data else [source.begun + data]
        lines = [line + b"\n" for line in lines]
        if lines:
            source.since = self._clock()
        lines += self._overdue(source, stream)
        self._keep(rank, lines)
        return self._drawn([(stream, self._in_front(rank) + self._as_seen(line, stream)) for line in lines])

    def say(self, stream: str, text: bytes) -> list[Piece]:
        """Return what to write for `text` that is nobody's line."""
        return self._drawn([(stream, text)])

    def close(self) -> list[Piece]:
        """Return what is left: lines without an end."""
        pieces = []
        for (rank, stream), source in sorted(self._sources.items()):
            if source.begun:
                self._keep(rank, [source.begun])
                pieces.append((stream, self._in_front(rank) + self._as_seen(source.begun + self._end(stream), stream)))
                source.begun = b""
        return self._drawn(pieces)

    def tail(self, rank: int) -> list[bytes]:
        """Return the last lines of a rank, on either stream."""
        begun = [source.begun for (of, _), source in sorted(self._sources.items()) if of == rank and source.begun]
        return [*self._tails.get(rank, ()), *map(_last_drawn, begun)][-_TAIL:]

    def keep(self, rank: int, data: bytes) -> None:
        """Take `data` for the last lines of a rank without showing it."""
        self._keep(rank, data.splitlines())

    def _keep(self, rank: int, lines: Iterable[bytes]) -> None:
        kept = self._tails.setdefault(rank, deque(maxlen=_TAIL))
        for line in lines:
            kept.append(_last_drawn(line.rstrip(b"\r\n")))
            if self._heard:
                self._heard(rank, kept[-1])

    def _overdue(self, source: _Source, stream: str) -> list[bytes]:
        """Take what has been held back for too long from what is begun."""
        if len(source.begun) > _LONGEST:
            line, source.begun = source.begun + self._end(stream), b""
            return [line]
        if stream in self._style.columns or self._clock() < source.since + _REDRAWN:
            return []
        drawn, found, source.begun = source.begun.rpartition(b"\r")
        if not found:
            source.begun = drawn + source.begun
            return []
        source.since = self._clock()
        return [drawn.strip(b"\r") + b"\n"] if drawn.strip(b"\r") else []

    def _end(self, stream: str) -> bytes:
        """Return what ends a line that has no end: nothing where it is one rank's alone, byte by byte."""
        return b"\n" if self._style.label or len(self._tails) > 1 or stream in self._style.columns else b""

    def _as_seen(self, line: bytes, stream: str) -> bytes:
        """Return a line as a terminal would show it in the end: what stands in front would be overwritten otherwise."""
        if stream not in self._style.columns or b"\r" not in line:
            return line
        return _last_drawn(line.rstrip(b"\r\n")) + b"\n"

    def _in_front(self, rank: int) -> bytes:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(self._clock())) if self._style.stamped else ""
        return (stamp + (f"[{rank}] " if self._style.label else "")).encode()

    def _drawn(self, pieces: list[Piece]) -> list[Piece]:
        """Return `pieces` with what is begun at the bottom of the terminal."""
        wanted = self._bottom()
        if wanted == self._shown and not pieces:
            return []
        before: list[Piece] = [(self._shown[0], _ERASE)] if self._shown else []
        self._shown = wanted
        return [*before, *pieces, *([wanted] if wanted else [])]

    def _bottom(self) -> Piece | None:
        for (rank, stream), source in sorted(self._sources.items()):
            text = _last_drawn(source.begun)
            if text and stream in self._style.columns:
                return stream, self._cut((self._in_front(rank) + text), self._style.columns[stream])
        return None

    def _cut(self, text: bytes, columns: int) -> bytes:
        """Return what fits into one row: what has gone on to the next one could not be erased."""
        shown, room = "", max(1, columns - 1)
        for part in _PARTS.findall(text.decode("utf-8", "replace")):
            room -= _width(part)
            if room < 0:
                break
            shown += part
        return shown.encode() + (_PLAIN if "\x1b" in shown else b"")


def _width(part: str) -> int:
    """Return how many cells of a terminal a character takes, or a sequence that sets colours."""
    if len(part) > 1 or unicodedata.combining(part):
        return 0
    return 2 if unicodedata.east_asian_width(part) in "WF" else 1


def _last_drawn(text: bytes) -> bytes:
    """Return what a terminal shows of a line that was drawn over and over, roughly."""
    return next((part for part in reversed(text.split(b"\r")) if part.strip()), b"")
