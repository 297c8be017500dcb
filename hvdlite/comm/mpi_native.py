"""MPI's own collectives: the yardstick, and the way that works everywhere.

MPI 3 counts in C ints. What is longer is done in pieces, or by one rank after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.comm.mpi import MPI, as_communication_error
from hvdlite.dtypes import SUPPORTED, ReduceOp, is_floating

Array = NDArray[Any]

_TYPES: dict[np.dtype[Any], MPI.Datatype] = {
    SUPPORTED["uint8"]: MPI.UINT8_T,
    SUPPORTED["int8"]: MPI.INT8_T,
    SUPPORTED["uint16"]: MPI.UINT16_T,
    SUPPORTED["int16"]: MPI.INT16_T,
    SUPPORTED["uint32"]: MPI.UINT32_T,
    SUPPORTED["int32"]: MPI.INT32_T,
    SUPPORTED["uint64"]: MPI.UINT64_T,
    SUPPORTED["int64"]: MPI.INT64_T,
    SUPPORTED["float32"]: MPI.FLOAT,
    SUPPORTED["float64"]: MPI.DOUBLE,
    SUPPORTED["complex64"]: MPI.C_FLOAT_COMPLEX,
    SUPPORTED["complex128"]: MPI.C_DOUBLE_COMPLEX,
}
_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.PRODUCT: MPI.PROD, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}
_BOOL_OPS = {ReduceOp.PRODUCT: MPI.MIN, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}  # on bytes 0 and 1


class NativeCollectives:
    """MPI's collectives over the ranks of a group. All are collective, and belong to the thread of the data plane.

    Arrays are flat and contiguous, and counts are elements. Every supported dtype can be moved; `supports` tells
    which can be reduced.
    """

    limit = 2**31 - 1  # what MPI's counts and displacements can say, elements or bytes

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    @property
    def threads_multiple(self) -> bool:
        """True if several threads may use MPI at the same time."""
        return MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def supports(self, dtype: np.dtype[Any], op: ReduceOp) -> bool:
        """True if MPI reduces `dtype` with `op` to what hvdlite promises.

        MPI has no half types, and what its MIN and MAX make of a NaN is left open. Open MPI 5.0.11 was
        seen to saturate sums of int8 (100 + 49 = 127) where everybody else wraps: short integers go another way.
        """
        if dtype.kind in "iu" and dtype.itemsize < 4:
            return False
        if dtype == SUPPORTED["bool"]:
            return op in _BOOL_OPS
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return dtype in _TYPES and not is_floating(dtype) and dtype.kind != "c"
        return dtype in _TYPES and op in _OPS

    def allreduce(self, array: Array, op: ReduceOp) -> None:
        """Reduce `array` over all ranks, in place."""
        view, datatype, mpi_op = _reducible(array, op)
        with as_communication_error("MPI_Allreduce"):
            for piece in self._pieces(view):
                self._comm.Allreduce(MPI.IN_PLACE, [piece, piece.size, datatype], mpi_op)

    def reducescatter(self, source: Array, counts: Sequence[int], target: Array, op: ReduceOp) -> None:
        """Reduce `source`, and put the piece of `counts[rank]` elements that is this rank's into `target`."""
        view, datatype, mpi_op = _reducible(source, op)
        into = _reducible(target, op)[0]
        with as_communication_error("MPI_Reduce_scatter"):
            if view.size <= self.limit:
                self._comm.Reduce_scatter(
                    [view, view.size, datatype], [into, into.size, datatype], list(counts), mpi_op
                )
                return
            for root, part in enumerate(_split(view, counts)):
                for start in range(0, part.size, self.limit):
                    piece = part[start : start + self.limit]
                    inbox = into[start : start + self.limit] if root == self._comm.rank else piece
                    self._comm.Reduce([piece, piece.size, datatype], [inbox, piece.size, datatype], mpi_op, root)

    def broadcast(self, array: Array, root: int) -> None:
        """Copy `array` of `root` to all others, in place."""
        with as_communication_error("MPI_Bcast"):
            for piece in self._pieces(array.view(np.uint8)):
                self._comm.Bcast([piece, piece.size, MPI.BYTE], root)

    def allgather(self, source: Array, counts: Sequence[int], target: Array) -> None:
        """Concatenate `counts[r]` elements of each rank r into `target`."""
        view, into, scale = source.view(np.uint8), target.view(np.uint8), source.itemsize
        lengths = [count * scale for count in counts]
        with as_communication_error("MPI_Allgatherv"):
            if into.size <= self.limit:
                self._comm.Allgatherv([view, view.size, MPI.BYTE], [into, lengths, MPI.BYTE])
                return
            for root, part in enumerate(_split(into, lengths)):
                if root == self._comm.rank:
                    part[:] = view
                for piece in self._pieces(part):
                    self._comm.Bcast([piece, piece.size, MPI.BYTE], root)

    def alltoall(self, source: Array, send: Sequence[int], target: Array, receive: Sequence[int]) -> None:
        """Send `send[r]` elements of `source` to each rank r, in order; `target` takes `receive[r]` from each."""
        view, into, scale = source.view(np.uint8), target.view(np.uint8), source.itemsize
        sent, received = [count * scale for count in send], [count * scale for count in receive]
        with as_communication_error("MPI_Alltoallv"):
            # All ranks must go the same way, and each knows only its own lengths.
            longest = self._comm.allreduce(max(view.size, into.size), MPI.MAX)
            if longest <= self.limit:
                self._comm.Alltoallv([view, sent, MPI.BYTE], [into, received, MPI.BYTE])
                return
            requests = [
                start(piece, rank)
                for start, array, lengths in ((self._irecv, into, received), (self._isend, view, sent))
                for rank, part in enumerate(_split(array, lengths))
                for piece in self._pieces(part)
            ]
            MPI.Request.Waitall(requests)

    def _irecv(self, piece: Array, rank: int) -> MPI.Request:
        return self._comm.Irecv([piece, piece.size, MPI.BYTE], rank)

    def _isend(self, piece: Array, rank: int) -> MPI.Request:
        return self._comm.Isend([piece, piece.size, MPI.BYTE], rank)

    def _pieces(self, array: Array) -> Iterator[Array]:
        for start in range(0, array.size, self.limit):
            yield array[start : start + self.limit]


def _reducible(array: Array, op: ReduceOp) -> tuple[Array, MPI.Datatype, MPI.Op]:
    if array.dtype == SUPPORTED["bool"]:
        return array.view(np.uint8), MPI.UINT8_T, _BOOL_OPS[op]
    return array, _TYPES[array.dtype], _OPS[op]


def _split(array: Array, counts: Sequence[int]) -> list[Array]:
    """Cut `array` into consecutive pieces of the given lengths. No copies."""
    ends = np.cumsum(counts).tolist()
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]
