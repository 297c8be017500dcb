"""PowerSGD: each matrix of gradients as the product of two thin ones.

    rounds                 2 (allreduce)
    bytes sent per rank    8 (P - 1) / P · (the sum of r (n + m) over n × m matrices, and of what is no matrix)

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for
distributed optimization", NeurIPS 2019. One step of power iteration, which starts from the
result of the step before. The sum of all ranks is what is decomposed, so more ranks cost no
more bytes.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdlite import InvalidRequestError

from .hook import CommHook, Shapes, Steps, Wire
from .low_rank import orthonormal, outer

_HIGHEST = 32


class _Matrices(NamedTuple):
    """Matrices of one shape, which lie next to each other."""

    start: int
    b: int
    n: int
    m: int
    r: int

    @property
    def stop(self) -> int:
        return self.start + self.b * self.n * self.m

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.stop].view(self.b, self.n, self.m)


class _Memory(NamedTuple):
    """What stays here from step to step.

    Attributes:
        matrices: as they lie; behind them is what is sent as it is.
        fresh: where the iteration begins: m × r for each matrix, the same on all ranks.
        right: where it goes on.
    """

    matrices: list[_Matrices]
    fresh: list[torch.Tensor]
    right: list[torch.Tensor]


class PowerSGD(CommHook):
    """Matrices of gradients as products of thin ones, and what they lack is sent with the next steps.

    Vectors, and matrices that would not become smaller, are sent as they are. Weights of convolutions are matrices
    with a row for each output channel.

    Args:
        rank: columns of the thin matrices: 1 to 32. The cost grows with it; 1 to 4 are usual.
    """

    def __init__(self, rank: int = 1) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _HIGHEST:
            raise InvalidRequestError(
                f"Compression.powersgd(rank={rank!r}): expected a whole number from 1 to {_HIGHEST}; 1 to 4 are usual."
            )
        self.rank = rank

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank})"

    def order(self, shapes: Shapes) -> list[int]:
        """Matrices of one shape next to each other, what is sent as it is behind them."""
        rows = [self._as_matrix(shape) or (0, 0) for shape in shapes]
        return sorted(range(len(shapes)), key=lambda i: (rows[i] == (0, 0), rows[i]))

    def remember(self, name: str, shapes: Shapes, dtype: torch.dtype, size: int) -> _Memory:
        matrices, start = [], 0
        for rows, alike in itertools.groupby(shapes, self._as_matrix):
            if rows is not None:
                n, m = rows
                matrices.append(_Matrices(start, len(list(alike)), n, m, min(self.rank, n, m)))
                start = matrices[-1].stop
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        fresh = [torch.randn(g.b, g.m, g.r, generator=generator, dtype=dtype) for g in matrices]
        return _Memory(matrices, fresh, fresh)

    def reduce(self, flat: torch.Tensor, memory: _Memory, wire: Wire) -> Steps:
        matrices, fresh, right = memory
        n_whole = matrices[-1].stop if matrices else 0
        left, lefts = _room([(g.b, g.n, g.r) for g in matrices], flat, len(flat) - n_whole)
        for g, into, q, fallback in zip(matrices, lefts, right, fresh, strict=True):
            torch.bmm(g.of(flat), _started(q, fallback), out=into)
        as_it_is = left[len(left) - (len(flat) - n_whole) :]
        as_it_is.copy_(flat[n_whole:])
        flat[n_whole:] = 0.0
        yield wire.allreduce(left, last=not matrices)
        reduced = torch.empty_like(flat)
        torch.mul(as_it_is, wire.factor, out=reduced[n_whole:])
        if not matrices:
            return reduced, memory
        both, rights = _room([(g.b, g.m, g.r) for g in matrices], flat)
        for g, p, into in zip(matrices, lefts, rights, strict=True):
            p.copy_(orthonormal(p))
            torch.bmm(g.of(flat).transpose(1, 2), p, out=into)
            g.of(flat).baddbmm_(p, into.transpose(1, 2), alpha=-1.0)
        yield wire.allreduce(both, scale=wire.factor, last=True)
        scratch = torch.empty(max(g.stop - g.start for g in matrices), dtype=flat.dtype)
        for g, p, q in zip(matrices, lefts, rights, strict=True):
            outer(p, q, g.of(reduced), scratch[: g.stop - g.start].view(g.b, g.n, g.m))
        return reduced, _Memory(matrices, fresh, rights)

    def _as_matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return rows and columns, or None for what is sent as it is."""
        if len(shape) < 2 or 0 in shape:
            return None
        n, m = shape[0], torch.Size(shape[1:]).numel()
        return (n, m) if min(self.rank, n, m) * (n + m) < n * m else None


def _room(
    shapes: Sequence[tuple[int, int, int]], like: torch.Tensor, more: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a flat tensor with room for tensors of `shapes` and for `more` numbers, and the tensors in it."""
    lengths = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(sum(lengths) + more, dtype=like.dtype)
    return flat, [part.view(shape) for part, shape in zip(flat.split([*lengths, more]), shapes, strict=False)]


def _started(right: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Return columns of length 1 to multiply with. Those without a direction, after gradients of 0, begin anew."""
    lengths = right.norm(dim=1, keepdim=True)
    return torch.where(lengths > 0, right / lengths, fresh)
