"""The public operations, on NumPy arrays and on whatever speaks the array or DLPack protocol.

Every function here but `poll` is collective over its process set: each member must
call it, with equal names (or in the same order, if there are none), in any order
relative to other names. Results are NumPy arrays. The `_async` forms return a Handle
at once; until it is done the input must not change. All raise `HorovodInternalError`
(`MismatchError`, `RemoteError`, …) when the ranks differ or one could not take part,
and `InvalidRequestError`, a ValueError, when this rank's arguments are wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hvdlite.arrays import as_array, contiguous
from hvdlite.engine.handle import GroupHandle, Handle
from hvdlite.lowlevel import (
    JOIN_NAME,
    Item,
    Kind,
    ReduceOp,
    asynchronous,
    name_for,
    refusing,
    start,
    start_empty,
    synchronous,
)
from hvdlite.process_set import ProcessSet, global_process_set
from hvdlite.starting import (
    allocate,
    allreduce_and_wait,
    as_splits,
    names_of_group,
    start_allgather,
    start_allreduce,
    start_broadcast,
    start_reducescatter,
    to_new,
    to_same,
    with_int32_splits,
)

AnyHandle = Handle | GroupHandle

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def synchronize(handle: AnyHandle) -> Any:
    """Wait for an `_async` operation and return its result, or raise its error. As often as you like."""
    return handle.wait()


def poll(handle: AnyHandle) -> bool:
    """Return whether `synchronize(handle)` would return at once. Not collective."""
    return handle.poll()


# Reductions


@asynchronous
def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `allreduce`; the result is a new array."""
    names = [name_for(Kind.ALLREDUCE, name, process_set)]
    factors = prescale_factor, postscale_factor
    return start_allreduce([tensor], names, (op, average), factors, process_set, to_new)[0]


@asynchronous
def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `allreduce_`; the result is `tensor` itself."""
    names = [name_for(Kind.ALLREDUCE, name, process_set)]
    factors = prescale_factor, postscale_factor
    return start_allreduce([tensor], names, (op, average), factors, process_set, to_same)[0]


@asynchronous
def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `grouped_allreduce`; the result is a list of new arrays."""
    names = names_of_group("grouped_allreduce", name, tensors, process_set)
    factors = prescale_factor, postscale_factor
    return GroupHandle(start_allreduce(tensors, names, (op, average), factors, process_set, to_new))


@asynchronous
def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `grouped_allreduce_`; the result is the list of `tensors`."""
    names = names_of_group("grouped_allreduce", name, tensors, process_set)
    factors = prescale_factor, postscale_factor
    return GroupHandle(start_allreduce(tensors, names, (op, average), factors, process_set, to_same))


@asynchronous
def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Start `reducescatter`."""
    names = [name_for(Kind.REDUCESCATTER, name, process_set)]
    return start_reducescatter([tensor], names, op, (prescale_factor, postscale_factor), process_set)[0]


@asynchronous
def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Start `grouped_reducescatter`."""
    names = names_of_group("grouped_reducescatter", name, tensors, process_set)
    return GroupHandle(start_reducescatter(tensors, names, op, (prescale_factor, postscale_factor), process_set))


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return postscale * reduce(prescale * tensor) over the ranks of the set: the same bits on all of them.

    Args:
        tensor: any shape and strides; shape and dtype equal on all ranks.
        average: Horovod's old way to say op=Average (True) or op=Sum (False).
        op: Average (default), Sum, Min, Max, Product or Adasum. Sums of integers wrap in their own dtype, and
            averages of them truncate towards zero; float16 and bfloat16 are added in float32 and rounded once.
    """
    factors = prescale_factor, postscale_factor
    return allreduce_and_wait(tensor, average, name, op, factors, process_set, in_place=False)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Like `allreduce`, into `tensor`: a writable array of any strides, which is also returned."""
    factors = prescale_factor, postscale_factor
    return allreduce_and_wait(tensor, average, name, op, factors, process_set, in_place=True)


grouped_allreduce = synchronous(
    grouped_allreduce_async,
    "Like `allreduce` on each of `tensors`, which become ready together: all are reduced, or all raise. A list.",
)
grouped_allreduce_ = synchronous(grouped_allreduce_async_, "Like `grouped_allreduce`, in place.")
reducescatter = synchronous(
    reducescatter_async,
    """Reduce `tensor` over the ranks, and return this rank's rows of the result.

    Args:
        tensor: at least one dimension; shape and dtype equal on all ranks. Of its n rows, the first n % size
            ranks get n // size + 1 and the others n // size, in rank order.
        op: Average (default) or Sum.
    """,
)
grouped_reducescatter = synchronous(
    grouped_reducescatter_async,
    "Like `reducescatter` on each of `tensors`, which become ready together. Returns a list.",
)


# Moving data


@asynchronous
def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> AnyHandle:
    """Start `allgather`."""
    return start_allgather([tensor], [name_for(Kind.ALLGATHER, name, process_set)], process_set)[0]


@asynchronous
def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `grouped_allgather`."""
    names = names_of_group("grouped_allgather", name, tensors, process_set)
    return GroupHandle(start_allgather(tensors, names, process_set))


@asynchronous
def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `broadcast`; the result is a new array."""
    return start_broadcast(tensor, root_rank, name, process_set, to_new)


@asynchronous
def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `broadcast_`; the result is `tensor` itself."""
    return start_broadcast(tensor, root_rank, name, process_set, to_same)


@asynchronous
def alltoall_async(
    tensor: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `alltoall`. The handle's result is always the pair (array, received splits)."""
    names = [name_for(Kind.ALLTOALL, name, process_set)]
    with refusing(Kind.ALLTOALL, names, process_set):
        source = contiguous(as_array(tensor))
        rows = None if splits is None else as_splits(splits)
    item = Item(source, allocate=functools.partial(allocate, source.dtype), convert=with_int32_splits)
    return start(Kind.ALLTOALL, names, [item], process_set, splits=rows)[0]


def alltoall(
    tensor: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to every rank, and return the rows that came from them, in rank order.

    Args:
        tensor: at least one dimension; all but the first are equal on all ranks, as is the dtype.
        splits: rows for each rank of the set; may be 0, and rows beyond their sum stay here.
            None cuts evenly.

    Returns:
        The array; with `splits` the pair (array, received splits as int32).
    """
    output, received = _alltoall(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


_alltoall = synchronous(alltoall_async, "Like `alltoall`, and always returns the pair.")
allgather = synchronous(
    allgather_async,
    """Return the tensors of all ranks, concatenated along the first dimension in rank order.

    Args:
        tensor: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype may not.
    """,
)
grouped_allgather = synchronous(
    grouped_allgather_async, "Like `allgather` on each of `tensors`, which become ready together. Returns a list."
)
broadcast = synchronous(
    broadcast_async,
    """Return `tensor` of rank `root_rank` on all ranks.

    Args:
        tensor: shape and dtype equal on all ranks; the values count on the root only.
        root_rank: a global rank, also within a process set.
    """,
)
broadcast_ = synchronous(broadcast_async_, "Like `broadcast`, into `tensor`, which is also returned.")


# Meeting


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called this. Operations in flight need not be done."""
    start_empty(Kind.BARRIER, name_for(Kind.BARRIER, None, process_set), process_set).wait()


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has no more data, and wait until all ranks of the set have said so.

    Meanwhile this rank takes part in what the others run: it contributes zeros to sums and averages (which
    still divide by the full size), what changes nothing to Min, Max, Product and Adasum, no rows to
    allgather and alltoall; it may not be the root of a broadcast.

    Args:
        device: accepted for Horovod's sake.

    Returns:
        The global rank that joined last.
    """
    handle = start_empty(Kind.JOIN, JOIN_NAME, process_set)
    members = process_set.ranks
    last = int(handle.wait())
    return members[last] if members else last
