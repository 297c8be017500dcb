"""Many tensors as one run of memory and back, through scratch that is reused.

Nothing is copied where one tensor is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ALIGN = 64  # bytes: a cache line, and what DLPack consumers expect


class Scratch:
    """Named, growing pieces of memory. Steady state allocates nothing. Belongs to one thread."""

    def __init__(self) -> None:
        self._bytes: dict[str, Array] = {}

    def take(self, name: str, dtype: np.dtype[Any], length: int) -> Array:
        """Return `length` elements, not initialised. The same memory for the same `name` every time."""
        nbytes = length * dtype.itemsize
        held = self._bytes.get(name)
        if held is None or held.nbytes < nbytes:
            # A quarter more, so that slowly growing requests do not allocate every time.
            held = self._bytes[name] = aligned_empty(nbytes + nbytes // 4)
        return held[:nbytes].view(dtype)

    def clear(self) -> None:
        """Give all memory back."""
        self._bytes.clear()


def aligned_empty(nbytes: int) -> Array:
    """Return `nbytes` bytes that start at a multiple of 64, not initialised."""
    raw = np.empty(nbytes + ALIGN, np.uint8)
    skip = -raw.ctypes.data % ALIGN
    return raw[skip : skip + nbytes]


def total_length(arrays: Sequence[Array]) -> int:
    return sum([array.size for array in arrays])  # a list: a generator costs 0.3 us more


def concatenate(arrays: Sequence[Array], out: Array) -> None:
    """Copy `arrays`, one after the other, into `out`."""
    start = 0
    for array in arrays:
        stop = start + array.size
        if stop > start:
            out[start:stop] = array
        start = stop


def distribute(fused: Array, arrays: Sequence[Array]) -> None:
    """Copy `fused` back into `arrays`, one after the other."""
    start = 0
    for array in arrays:
        stop = start + array.size
        if stop > start:
            array[:] = fused[start:stop]
        start = stop


def offsets(counts: Sequence[int]) -> list[int]:
    """Return where each run starts, and where the last one ends: one more than there are counts."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def as_bytes(array: Array) -> Array:
    """Return the memory of a contiguous array as uint8. No copy."""
    return array.view(np.uint8)
