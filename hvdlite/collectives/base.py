"""The contract of a Backend: one way of running the agreed collectives of one process set.

A backend is driven by one thread, with the same calls in the same order on all
ranks of its communicator. It knows nothing about names, negotiation or frameworks.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from hvdlite.comm.base import Communicator
from hvdlite.dtypes import ReduceOp
from hvdlite.kernels import Finish, Kernels
from hvdlite.messages import Knobs

Array = NDArray[Any]


class Backend(abc.ABC):
    """One way of moving and reducing.

    Arrays are one-dimensional, C-contiguous, native-endian and of a supported dtype. `op` is never
    AVERAGE here: an average is SUM with a `Finish`. Half types accumulate in float32 in rank order
    and are rounded once, after `finish`. All ranks end with the same bits.
    """

    name: str
    remark = ""  # what it has found out about this machine and goes by, for the user; follows the reason of a choice

    def __init__(self, comm: Communicator, kernels: Kernels) -> None:
        self.comm, self.kernels = comm, kernels

    @abc.abstractmethod
    def allreduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = Finish(),
    ) -> None:
        """Reduce `sources` (as if concatenated) over all ranks into `targets`.

        `targets[i]` has the length and dtype of `sources[i]` and is either the same memory or does
        not overlap it. All arrays of a call have one dtype. `prescale` multiplies each rank's values
        before, `finish` the result after. For ADASUM each `sources[i]` is one tensor of the rule.
        """

    @abc.abstractmethod
    def reducescatter(
        self,
        sources: Sequence[Array],
        counts: Sequence[Sequence[int]],
        targets: Sequence[Array],
        op: ReduceOp,
        prescale: float = 1.0,
        finish: Finish = Finish(),
    ) -> None:
        """Reduce, and leave each rank its piece: `counts[i][r]` elements of `sources[i]` go to rank r, in order."""

    @abc.abstractmethod
    def allgather(self, sources: Sequence[Array], counts: Sequence[Sequence[int]], targets: Sequence[Array]) -> None:
        """Concatenate over ranks: `targets[i]` receives `counts[i][r]` elements from each rank r, in rank order.

        `len(sources[i]) == counts[i][rank]`. `sources` may have different dtypes.
        """

    @abc.abstractmethod
    def broadcast(self, array: Array, root: int) -> None:
        """Copy `array` of `root` (a rank of the group) into `array` of all others, in place."""

    @abc.abstractmethod
    def alltoall(self, source: Array, send: Sequence[int], target: Array, receive: Sequence[int]) -> None:
        """Send `send[r]` elements of `source` to each rank r, in order; `target` takes `receive[r]` from each."""

    def tune(self, knobs: Knobs) -> None:  # noqa: B027  (not all have sizes to choose)
        """Work with other sizes from the next call on. Collective; `knobs` are equal on all ranks."""

    def close(self) -> None:  # noqa: B027  (most have nothing to give back)
        """Give scratch memory back. Collective."""
