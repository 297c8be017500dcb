"""Memory for results that TensorFlow takes over without a copy.

It does so at multiples of 64 bytes only; elsewhere `from_dlpack` even aborts the process. A piece that TensorFlow has
let go of is used again: pages that the system must clear first would cost more than the reduction.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ALIGNMENT = 64  # bytes
_POOLED = 4096  # bytes from which a piece is kept: below, a finalizer (2 us) takes longer than new memory


class Pool:
    """Pieces of memory by their length. Any thread may take; a piece comes back when the last array over it is gone."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array with any values, which begins at a multiple of `ALIGNMENT`."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _POOLED:
            return np.frombuffer(_aligned(nbytes), np.uint8).view(dtype).reshape(shape)
        with self._lock:
            free = self._free[nbytes]
            piece = free.pop() if free else None
        if piece is None:
            piece = _aligned(nbytes)
        # Not a slice of some array: NumPy would let views of it hold that array, and not this one.
        owner = np.frombuffer(piece, np.uint8)
        weakref.finalize(owner, free.append, piece).atexit = False
        return owner.view(dtype).reshape(shape)

    def clear(self) -> None:
        """Give back to the system what nobody uses."""
        with self._lock:
            self._free.clear()


def _aligned(nbytes: int) -> memoryview:
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes].data


pool = Pool()
