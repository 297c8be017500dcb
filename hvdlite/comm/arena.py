"""Memory in which tensors live while all ranks of a host see them: what is reduced there is not copied first.

A `SharedBuffer` is made collectively, has one block per rank, and belongs to the group that made it. It says
where in its block an array lies; the engine compares that between ranks, and only what lies at the same place
on all of them is reduced in place.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Home(NamedTuple):
    """Where a tensor lies in a `SharedBuffer`. Keeps its memory alive while an operation is under way.

    Attributes:
        number: of the buffer, the same on all ranks and never used twice in a group.
        start: bytes from the beginning of the block.
        blocks: the flat uint8 block of each rank.
    """

    number: int
    start: int
    blocks: Sequence[Array]


class SharedBuffer:
    """A block of memory of this rank that the other ranks of the group see, too.

    Made by `hvdlite.lowlevel.shared_buffer`. The memory is given back to the system when the last array over it
    is gone on every rank.

    Attributes:
        array: this rank's block: flat uint8, 4096-byte aligned, zeroed when new.
        nbytes: its length.
    """

    def __init__(self, group: object, rank: int, number: int, blocks: Sequence[Array]) -> None:
        self._group: object | None = group
        self._blocks = blocks
        self._number = number
        self.array: Array = blocks[rank]
        self.nbytes = self.array.nbytes
        self._address = address_of(self.array)

    def home_of(self, array: Array, group: object) -> Home | None:
        """Return where `array` lies, or None: it is not in here, `group` has not made this, or it is closed."""
        if self._group is not group or group is None:
            return None
        start = address_of(array) - self._address
        if start < 0 or start + array.nbytes > self.nbytes or start % array.itemsize:
            return None
        return Home(self._number, start, self._blocks)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Makes `np.asarray(buffer)` the block as an array that keeps this object, as do all views of it."""
        interface: dict[str, Any] = self.array.__array_interface__
        return interface

    def close(self) -> None:
        """Let operations treat the memory as any other from here on. Not collective; arrays over it stay valid."""
        self._group = None
        self._blocks = ()
        self.array = np.empty(0, np.uint8)


class Homes:
    """The shared buffers of a group whose memory users hold as plain arrays: which one an array lies in. Any thread.

    A buffer is forgotten with the last array over it.
    """

    def __init__(self) -> None:
        self._by_address: weakref.WeakValueDictionary[int, SharedBuffer] = weakref.WeakValueDictionary()
        self._addresses: list[int] = []  # ascending; may name what is gone

    def __bool__(self) -> bool:
        return bool(self._addresses)

    def keep(self, buffer: SharedBuffer) -> Array:
        """Return the block of `buffer` as an array; `find` knows it and its views as long as there is one."""
        array = np.asarray(buffer)
        self._by_address[address_of(array)] = buffer
        self._addresses = sorted(self._by_address)
        return array

    def find(self, array: Array, group: object) -> Home | None:
        """Return where `array` lies, or None where that is in no buffer of `group` that is kept here."""
        addresses = self._addresses
        place = bisect.bisect_right(addresses, address_of(array)) - 1
        buffer = self._by_address.get(addresses[place]) if place >= 0 else None
        return None if buffer is None else buffer.home_of(array, group)


def address_of(array: Array) -> int:
    """Return the address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address
