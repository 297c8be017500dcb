"""The largest gradients only.

    rounds                 1 (allgather)
    bytes sent per rank    6 r n (P - 1)    for a share r of n gradients, and P ranks

A ring of float32 sends 8n (P - 1) / P: the gain is 4 / (3 r P), and ends where r P is 4/3.

Which are the largest is asked within blocks, since that takes half the time that it takes for
all together, and an index within a block is two bytes. What the theory of error feedback asks
for, that a share r of the square of the norm is sent at least, blocks give as well (Stich, Cordonnier
and Jaggi, "Sparsified SGD with memory", NeurIPS 2018).
"""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import InvalidRequestError

from .hook import CommHook, Steps, Wire

_SENT_OF_BLOCK = 10  # gradients, where the block may be as long as that takes
_SHORTEST, _LONGEST = 256, 2**15  # of a block; its indices fit into int16


class TopK(CommHook):
    """The largest gradients of each block, and the others are held back until they have added up.

    Args:
        ratio: the share of gradients that is sent: above 0, and at most 1.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise InvalidRequestError(
                f"Compression.topk(ratio={ratio!r}): expected a number above 0 and at most 1, such as 0.01."
            )
        self.ratio = float(ratio)

    def __repr__(self) -> str:
        return f"TopK(ratio={self.ratio})"

    def reduce(self, flat: torch.Tensor, memory: Any, wire: Wire) -> Steps:
        blocks, n_sent = self.cut(flat)
        values, where = take_largest(blocks, n_sent)
        received = yield wire.allgather(_pack(values, where), last=True)
        total = torch.zeros_like(blocks)
        for row in received:
            values, where = _unpack(row, values)
            # A rank sends an index once, so the order of additions is that of the ranks, everywhere.
            total.scatter_add_(1, where, values * wire.factor)
        return total.view(-1), None

    def length(self, n: int, size: int) -> int:
        block = self._block(n)
        return -(-n // block) * block

    def cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return `flat` in blocks, and how many of each are sent."""
        block = self._block(len(flat))
        return flat.view(-1, block), min(block, max(1, round(self.ratio * block)))

    def _block(self, n: int) -> int:
        """Return the length of the blocks of n gradients."""
        return max(1, min(n, _LONGEST, max(_SHORTEST, round(_SENT_OF_BLOCK / self.ratio))))


def take_largest(blocks: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the n largest numbers of each row and where they were, and leave zeros there. inf and nan are large."""
    where = blocks.abs().topk(n, dim=1, sorted=False).indices
    values = blocks.gather(1, where)
    blocks.scatter_(1, where, 0.0)
    return values, where


def _pack(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return one row of bytes."""
    return torch.cat([values.view(1, -1).view(torch.uint8), where.to(torch.int16).view(1, -1).view(torch.uint8)], dim=1)


def _unpack(row: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    split = like.numel() * like.dtype.itemsize
    # Copies, for not every rank's bytes begin where such numbers may.
    values, where = row[:split].clone().view(like.dtype), row[split:].clone().view(torch.int16)
    return values.view(like.shape), where.view(like.shape).long()
