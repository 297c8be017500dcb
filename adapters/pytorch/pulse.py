"""What a rank tells the others about its round of backward passes, along with the gradients.

A handful of numbers is reduced like a gradient, and fused with them, so that it costs next to
nothing. From the mean of a value and of its square each rank sees whether all had the
same, and all ranks come to the same answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from hvdlite.lowlevel import GroupHandle, Handle, Item

from .tensors import to_same

_DIGIT = 16  # values are below it: their squares are then exact in float32, and means nearly so


class News(NamedTuple):
    """What the ranks found out.

    Attributes:
        incomplete: some rank's backward() ended without the last gradient of some parameter.
        failed: some rank's backward() raised.
        rounds_differ: the ranks have reduced gradients a different number of times since their last step().
        frozen_differ: `requires_grad` of some parameter differs between ranks.
    """

    incomplete: bool
    failed: bool
    rounds_differ: bool
    frozen_differ: bool


class Pulse:
    """One rank's numbers, on their way."""

    def __init__(self, name: str, incomplete: bool, failed: bool, rounds: int, frozen: Iterable[str]) -> None:
        self.name, self.failed = name, failed
        self.handle: Handle | GroupHandle | None = None
        crc = zlib.crc32(repr(list(frozen)).encode())
        digits = [rounds % _DIGIT, *(crc >> shift & (_DIGIT - 1) for shift in (0, 4, 8, 12))]
        values = [1, int(incomplete), int(failed), *digits, *(digit * digit for digit in digits)]
        self._numbers = torch.tensor(values, dtype=torch.float32)

    def item(self) -> Item:
        return to_same(self._numbers)

    def news(self) -> News:
        """Wait, and return what the ranks said together."""
        assert self.handle is not None
        self.handle.wait()
        # Scaled by the number of ranks, by factors, by ranks that have joined: 1 says how much.
        one, incomplete, failed, *numbers = self._numbers.tolist()
        half = len(numbers) // 2
        differ = [
            squares / one - (total / one) ** 2 > 1e-3
            for total, squares in zip(numbers[:half], numbers[half:], strict=True)
        ]
        return News(incomplete / one > 1e-6, failed / one > 1e-6, differ[0], any(differ[1:]))
