"""Numbers as int8 with one scale for each block. Pure.

bytes for n numbers    n + 4 n / block    (8 n / block in float64)
largest error          1/254 of the largest number of the block
"""

from __future__ import annotations

import torch

_LEVELS = 127


def quantise(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int8 numbers, scale of each row), for rows of floating-point numbers.

    A row that has inf or nan gets such a scale, and is not finite when it is restored.
    """
    largest = blocks.abs().amax(dim=1, keepdim=True)
    scales = largest / _LEVELS
    # Below, 1 / scale would be inf. Such numbers count as 0.
    negligible = largest < torch.finfo(blocks.dtype).tiny * 256
    scales.masked_fill_(negligible, 0.0)
    steps = (1 / scales).masked_fill_(negligible, 0.0)
    return (blocks * steps).round_().to(torch.int8), scales


def restore(numbers: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` with what `quantise` was given, nearly."""
    return out.copy_(numbers).mul_(scales)  # torch.mul of int8 and float32 takes twice as long


def pack(numbers: torch.Tensor, scales: torch.Tensor, n: int = 1) -> torch.Tensor:
    """Return numbers and scales as n rows of bytes; each has its share of both, the scales first."""
    return torch.cat([scales.view(torch.uint8).view(n, -1), numbers.view(torch.uint8).view(n, -1)], dim=1)


def unpack(row: torch.Tensor, n_blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (numbers, scales) of one row of `pack`."""
    split = n_blocks * dtype.itemsize
    return row[split:].view(torch.int8).view(n_blocks, -1), row[:split].view(dtype).view(n_blocks, 1)
