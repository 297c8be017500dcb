"""A Buffer: the flat piece of memory of one tensor, as the engine sees it.

Never a framework tensor. Host memory only carries a NumPy view; memory of another
device will carry an address, and the event after which it may be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdlite.dtypes import canonical, name_of


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory lives: ("cpu", 0), ("cuda", 1)."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu")


class Event(Protocol):
    """Something that happens on a device before a buffer holds its values."""

    def wait(self) -> None:
        """Return, on the host, once it has happened."""


@dataclass(slots=True)
class Buffer:
    """Flat memory.

    Attributes:
        array: one-dimensional C-contiguous host view, or None for memory of another device.
        dtype: of the elements.
        n: number of elements.
        address: of the first element; 0 when `array` says it.
        device: where the memory lives.
        ready: happens before the memory may be read; None when it may be read now.
        owner: kept alive as long as the Buffer.
    """

    array: NDArray[Any] | None
    dtype: np.dtype[Any]
    n: int
    address: int = 0
    device: Device = CPU
    ready: Event | None = None
    owner: Any = None

    @classmethod
    def of(cls, array: NDArray[Any], ready: Event | None = None, owner: Any = None) -> Buffer:
        """Return the Buffer over a contiguous host array, without a copy. Any shape."""
        return cls(array.reshape(-1), array.dtype, array.size, ready=ready, owner=owner)

    def host(self) -> NDArray[Any]:
        """Return the values as a flat host array, once they are ready."""
        if self.ready is not None:
            self.ready.wait()
        if self.array is None:
            raise NotImplementedError(f"no backend reads memory of {self.device} yet")
        return self.array


def describe(array: NDArray[Any]) -> str:
    """Return `float32[3, 4]`, for messages."""
    return f"{name_of(canonical(array.dtype))}{list(array.shape)}"
