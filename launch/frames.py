"""What ranks tell hvdrun, out of what the launcher forwards. The other end is `launch/runner.py`."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass

_FRAME = re.compile(rb"\x1e(\d+) ([a-z]) ([A-Za-z0-9+/=]*)\r?\n")
_LONGEST = 1024  # bytes of a frame; what is longer without an end is none


@dataclass(frozen=True)
class Frame:
    """A piece of what a rank tells. `kind` as in runner.py."""

    rank: int
    kind: str
    data: bytes


class FrameReader:
    """Splits a stream into frames, and text of the launcher's own."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame | bytes]:
        """Return what is complete now. An empty `data` is the end of the stream."""
        found: list[Frame | bytes] = []
        rest = self._rest + data
        position = 0
        while (start := rest.find(b"\x1e", position)) >= 0:
            if start > position:
                found.append(rest[position:start])
            match = _FRAME.match(rest, start)
            if match:
                found.append(Frame(int(match[1]), match[2].decode(), binascii.a2b_base64(match[3])))
                position = match.end()
            elif data and b"\n" not in rest[start:] and len(rest) - start < _LONGEST:
                self._rest = rest[start:]
                return found
            else:  # not ours after all
                found.append(rest[start : start + 1])
                position = start + 1
        if position < len(rest):
            found.append(rest[position:])
        self._rest = b""
        return found
