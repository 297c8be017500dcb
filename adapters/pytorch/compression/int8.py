"""int8 numbers with a scale for each block.

    ranks         rounds    bytes sent per rank, for n gradients in blocks of b
    2             1         n + 4n/b                                 (allgather)
    P above 2     2         2 (n + 4n/b) (P - 1) / P                 (alltoall, add up, allgather)

A ring of float32 sends 8n (P - 1) / P. Two ranks exchange all that they have, which is as
much, and takes one round. More ranks add up a part each, and quantise the sums again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvdlite import InvalidRequestError

from .hook import CommHook, Shapes, Steps, Wire
from .quantise import pack, quantise, restore, unpack


class _Memory(NamedTuple):
    """What stays here from step to step: what was lost when this rank's part of the sums was quantised."""

    lost: torch.Tensor


class Int8(CommHook):
    """Gradients as int8, with a scale for each block, and what is lost is sent with the next step.

    A quarter of the bytes of float32, at the speed of a few passes over memory.

    Args:
        block_size: gradients that share a scale: a multiple of 8. Small blocks are more exact, and send more scales.
    """

    def __init__(self, block_size: int = 256) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size <= 0 or block_size % 8:
            raise InvalidRequestError(
                f"Compression.int8(block_size={block_size!r}): expected a positive multiple of 8, such as 256."
            )
        self.block_size = block_size

    def __repr__(self) -> str:
        return f"Int8(block_size={self.block_size})"

    def length(self, n: int, size: int) -> int:
        whole = self.block_size * (1 if size == 2 else size)
        return -(-n // whole) * whole

    def remember(self, name: str, shapes: Shapes, dtype: torch.dtype, size: int) -> _Memory:
        n = sum(torch.Size(shape).numel() for shape in shapes)
        mine = 0 if size == 2 else self.length(n, size) // size
        return _Memory(torch.zeros(mine, dtype=dtype).view(-1, self.block_size))

    def reduce(self, flat: torch.Tensor, memory: _Memory, wire: Wire) -> Steps:
        blocks = flat.view(-1, self.block_size)
        numbers, scales = quantise(blocks)
        scratch = torch.empty_like(blocks)
        if wire.size == 2:
            handle = wire.allgather(pack(numbers, scales), last=True)
            blocks -= restore(numbers, scales, scratch)  # while the bytes travel
            received = yield handle
            return _add_up(received, blocks, scratch, wire.factor).view(-1), memory
        handle = wire.alltoall(pack(numbers, scales, wire.size))
        blocks -= restore(numbers, scales, scratch)
        received, lengths = yield handle
        if not bool(lengths.all()):  # a rank has joined, and adds nothing up: everybody does it
            received = yield wire.allgather(pack(numbers, scales), last=True)
            return _add_up(received, blocks, scratch, wire.factor).view(-1), memory
        mine = _add_up(received, memory.lost, scratch[: len(memory.lost)])
        mine += memory.lost
        numbers, scales = quantise(mine)
        handle = wire.allgather(pack(numbers, scales), last=True)
        mine -= restore(numbers, scales, scratch[: len(mine)])
        for row, part in zip((yield handle), scratch.view(wire.size, *mine.shape), strict=True):
            numbers, scales = unpack(row, len(mine), flat.dtype)
            restore(numbers, scales * wire.factor, part)
        return scratch.view(-1), _Memory(mine)


def _add_up(rows: torch.Tensor, like: torch.Tensor, scratch: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return the sum of what ranks have sent, a row each, in the order of the ranks, multiplied by `factor`."""
    total = torch.zeros_like(like)
    for row in rows:
        numbers, scales = unpack(row, len(like), like.dtype)
        total += restore(numbers, scales * factor, scratch)
    return total
