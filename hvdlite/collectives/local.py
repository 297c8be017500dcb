"""One rank alone: scale in place, or copy. No steps, no bytes sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.collectives.base import Array, Backend
from hvdlite.dtypes import ReduceOp
from hvdlite.kernels import NO_FINISH, Finish


class LocalBackend(Backend):
    """The backend of a group of size 1."""

    name = "local"

    def allreduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        # Adasum of one rank is the rank's own tensor.
        plain = ReduceOp.SUM if op is ReduceOp.ADASUM else op
        for source, target in zip(sources, targets, strict=True):
            self.kernels.reduce(plain, (source,), target, prescale, finish)

    def reducescatter(
        self,
        sources: Sequence[Array],
        counts: Sequence[Sequence[int]],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = NO_FINISH,
    ) -> None:
        self.allreduce(sources, targets, op, prescale, finish)

    def allgather(self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]) -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)

    def broadcast(self, array: Array, root: int) -> None:
        pass

    def alltoall(self, source: Array, send: Sequence[int], target: Array, receive: Sequence[int]) -> None:
        np.copyto(target, source[: send[0]])
