"""Which backend runs a collective, and what its operator comes to there. Equal on all ranks.

Most steps are like the one before, so what was found is remembered.
"""

from __future__ import annotations

import functools
import math
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hvdlite.collectives.base import Backend
from hvdlite.collectives.select import Backends, choose
from hvdlite.collectives.shared_memory import SharedMemoryBackend
from hvdlite.collectives.tree import TreeBackend, is_tiny
from hvdlite.comm.base import Communicator
from hvdlite.config import Config
from hvdlite.dtypes import SUPPORTED, ReduceOp, is_half, is_integer
from hvdlite.fusion.plan import plan_fusion
from hvdlite.kernels import Finish
from hvdlite.messages import Kind, Knobs, Response

_COST_OF_HALVES = 4  # who reads half types converts them
_CHOICES = 256  # remembered


class Way(NamedTuple):
    """How a collective is run, why so, and what the timeline calls it."""

    backend: Backend
    chosen: str
    activity: str

    @property
    def reason(self) -> str:
        """Why this backend, and what it goes by itself."""
        return self.chosen + self.backend.remark


class How(NamedTuple):
    """How one allreduce is run that is a batch of its own.

    Attributes:
        cost: of reading what another rank has shown, in bytes. Infinite where this is no way to reduce it.
    """

    nbytes: int
    dtype: np.dtype[Any]
    op: ReduceOp
    finish: Finish
    way: Way
    cost: float


class Ways:
    """Of one process set."""

    def __init__(self, comm: Communicator, config: Config, backends: Backends) -> None:
        self._comm, self._config, self._backends = comm, config, backends
        self.knobs = Knobs.of(config)
        self.choose = functools.lru_cache(_CHOICES)(self._make_choice)
        self.how_one = functools.lru_cache(_CHOICES)(self._make_how)

    def tune(self, knobs: Knobs) -> None:
        """Choose by other knobs from here on."""
        self.knobs = knobs
        self.choose.cache_clear()
        self.how_one.cache_clear()

    def is_tiny(self, response: Response) -> bool:
        """Return whether this is an allreduce of so few bytes that ranks on several hosts send all to all."""
        dtype = SUPPORTED.get(response.dtype)
        if response.kind is not Kind.ALLREDUCE or response.op is ReduceOp.ADASUM or dtype is None:
            return False
        length = prod(response.shape)
        way = self.choose(response.kind, length * dtype.itemsize, dtype, wire_op(response.op))
        return isinstance(way.backend, TreeBackend) and is_tiny(length, dtype, self._comm.size)

    def _make_how(self, dtype: str, shape: tuple[int, ...], op: ReduceOp, prescale: float, postscale: float) -> How:
        response = Response(Kind.ALLREDUCE, "", dtype, shape, op, -1, prescale, postscale)
        (plan,) = plan_fusion([response], 0)
        kept, wired = SUPPORTED[dtype], wire_op(op)
        way = self.choose(Kind.ALLREDUCE, plan.nbytes, kept, wired)
        shows = wired is not ReduceOp.ADASUM and isinstance(way.backend, SharedMemoryBackend)
        cost = plan.nbytes * (_COST_OF_HALVES if is_half(kept) else 1) if shows else math.inf
        return How(plan.nbytes, kept, wired, finish_of(response, kept, self._comm.size), way, cost)

    def _make_choice(self, kind: Kind, nbytes: int, dtype: np.dtype[Any], op: ReduceOp | None = None) -> Way:
        choice = choose(
            kind.value, nbytes, dtype, op, self._comm.topology,
            shared_memory_available=self._backends.shared_memory_available,
            native_available=self._backends.native_available,
            hierarchical_available=self.knobs.hierarchical and self._backends.hierarchical_available,
            forced=self._config.backend,
            small_bytes=self.knobs.small_message,
        )  # fmt: skip
        activity = f"{choice.backend}_{'adasum_' if op is ReduceOp.ADASUM else ''}{kind.value}".upper()
        return Way(self._backends[choice.backend], choice.reason, activity)


def wire_op(op: ReduceOp) -> ReduceOp:
    """Return what backends compute for `op`: an average is a sum that `finish_of` divides."""
    return ReduceOp.SUM if op is ReduceOp.AVERAGE else op


def finish_of(response: Response, dtype: np.dtype[Any], size: int) -> Finish:
    """Return what backends do to reduced values of `response` before they store them."""
    if response.op is not ReduceOp.AVERAGE:
        return Finish(response.postscale)
    if is_integer(dtype) and response.postscale == 1.0:
        return Finish(divisor=size)  # exact, where a product with 1/size can be one too small
    return Finish(response.postscale / size)
