"""Adasum: a reduction that adds orthogonal gradients and averages equal ones.

For two vectors a and b of one tensor

    (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b

with dot products in float64, per tensor and not per fused buffer. More ranks combine in a binary
tree of neighbours: (0, 1), (2, 3), then the pairs. With P not a power of two, let p be the largest
power of two below P: ranks p, p + 1, … are first folded into ranks 0, 1, …, and the tree is over p.

    steps                  log2(P), two more when P is not a power of two
    bytes sent per rank    S log2(P)      half types travel as float32
    scratch                2 S

Source: Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hvdlite.collectives.base import Array
from hvdlite.collectives.pack import Scratch, offsets
from hvdlite.collectives.schedules import doubling_steps
from hvdlite.comm.base import Communicator
from hvdlite.dtypes import SUPPORTED, accumulator, is_half
from hvdlite.kernels import NO_FINISH, Finish, Kernels

_TINY = math.sqrt(sys.float_info.min)  # squared norms below it say nothing about a direction
_BLOCK = 64 * 1024  # elements whose products are added at a time


class Adasum:
    """The reduction of one group. Keeps its scratch."""

    def __init__(self, comm: Communicator, kernels: Kernels) -> None:
        self.comm, self.kernels = comm, kernels
        self._scratch = Scratch()

    def allreduce(
        self, sources: Sequence[Array], targets: Sequence[Array], prescale: float = 1.0, finish: Finish = NO_FINISH
    ) -> None:
        """Combine `sources`, each one tensor of the rule, over all ranks into `targets`. Collective."""
        if not sources:
            return
        bounds = offsets([source.size for source in sources])
        wide = accumulator(sources[0].dtype)
        mine = self._scratch.take("mine", wide, bounds[-1])
        theirs = self._scratch.take("theirs", wide, bounds[-1])
        tensors = [slice(start, stop) for start, stop in pairwise(bounds)]
        self._load(sources, tensors, mine, prescale)
        self._exchange(mine, theirs, tensors)
        self.kernels.finish(mine, finish)
        self._store(mine, tensors, targets)

    def clear(self) -> None:
        self._scratch.clear()

    def _exchange(self, mine: Array, theirs: Array, tensors: Sequence[slice]) -> None:
        for step in doubling_steps(self.comm.rank, self.comm.size):
            if step.sends and step.receives:
                self.comm.sendrecv(mine, step.partner, theirs, step.partner)
            elif step.sends:
                self.comm.send(mine, step.partner)
            elif step.reduces:
                self.comm.recv(theirs, step.partner)
            else:
                self.comm.recv(mine, step.partner)
            if step.reduces:
                for tensor in tensors:
                    # Both partners compute the same: the lower ranks' values are always `a`.
                    a, b = mine[tensor], theirs[tensor]
                    adasum_into(a, b, a) if self.comm.rank < step.partner else adasum_into(b, a, a)

    def _load(self, sources: Sequence[Array], tensors: Sequence[slice], wide: Array, prescale: float) -> None:
        for source, tensor in zip(sources, tensors, strict=True):
            if is_half(source.dtype):
                self.kernels.widen(source, wide[tensor])
            else:
                np.copyto(wide[tensor], source)
        if prescale != 1.0:
            self.kernels.scale(wide, wide, prescale)

    def _store(self, wide: Array, tensors: Sequence[slice], targets: Sequence[Array]) -> None:
        for tensor, target in zip(tensors, targets, strict=True):
            if is_half(target.dtype):
                self.kernels.narrow(wide[tensor], target)
            else:
                np.copyto(target, wide[tensor])


def adasum_into(a: Array, b: Array, out: Array) -> None:
    """Store the rule's result for one tensor in `out`, which may be `a` or `b`. float32 or float64."""
    with np.errstate(all="ignore"):
        along = _dot(a, b)
        of_a, of_b = _coefficient(along, _dot(a, a)), _coefficient(along, _dot(b, b))
        scalar = out.dtype.type
        for block in _blocks(a.size):
            other = b[block] * scalar(of_b)
            np.multiply(a[block], scalar(of_a), out=out[block])
            np.add(out[block], other, out=out[block])


def adasum_tree(values: Sequence[Array]) -> Array:
    """Return the combination of one tensor's `values`, one per rank: the definition, for tests and the reference."""
    power = 1 << (len(values).bit_length() - 1)
    level = list(values)
    for extra in range(power, len(values)):
        level[extra - power] = _adasum(level[extra - power], level[extra])
    del level[power:]
    while len(level) > 1:
        level = [_adasum(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def _adasum(a: Array, b: Array) -> Array:
    out = np.empty_like(a)
    adasum_into(a, b, out)
    return out


def _dot(a: Array, b: Array) -> float:
    # Not np.dot: BLAS may split the work by its number of threads, and ranks must get the same bits.
    total = 0.0
    for block in _blocks(a.size):
        total += float(np.add.reduce(np.multiply(a[block], b[block], dtype=SUPPORTED["float64"])))
    return total


def _coefficient(along: float, squared_norm: float) -> float:
    return 1.0 if squared_norm < _TINY else 1.0 - along / (2.0 * squared_norm)


def _blocks(length: int) -> Iterator[slice]:
    for start in range(0, length, _BLOCK):
        yield slice(start, start + _BLOCK)
