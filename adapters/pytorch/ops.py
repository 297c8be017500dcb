"""Operations that return at once, and those that change their argument. None of them builds a graph.

The differentiable forms are in `autograd`. Every function here is collective over its
process set, as in `hvdlite.api`. Until the handle is done its tensors must not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdlite import Average, InvalidRequestError, ProcessSet, global_process_set
from hvdlite.lowlevel import (
    GroupHandle,
    Handle,
    Item,
    Kind,
    ReduceOp,
    asynchronous,
    group_names,
    name_for,
    refusing,
    resolve_op,
    split_rows,
    start,
    synchronous,
)

from .at_once import reduce_again, reduce_at_once
from .handles import AnyHandle
from .tensors import allocate, as_array, as_source, as_splits, to_gathered, to_new, to_same

Tensors = Sequence[torch.Tensor]


class Reduction(NamedTuple):
    """What a reduction computes: postscale * op(prescale * tensor) over the ranks of a set."""

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet


def reduction_for(
    kind: Kind,
    names: Sequence[str],
    op: int | None,
    average: bool | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Reduction:
    """Return what the arguments of a call mean together. If that is nothing, the other ranks hear of it, too."""
    try:
        return Reduction(resolve_op(op, average), prescale, postscale, process_set)
    except InvalidRequestError:
        with refusing(kind, names, process_set):
            raise


# Reductions


@asynchronous
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `allreduce`; the result is a new tensor."""
    names = [name_for(Kind.ALLREDUCE, name, process_set)]
    if average is None:
        begun = reduce_again(tensor, names[0], op, prescale_factor, postscale_factor, process_set, in_place=False)
        if begun is not None:
            return begun
    reduction = reduction_for(Kind.ALLREDUCE, names, op, average, prescale_factor, postscale_factor, process_set)
    return start_allreduce([tensor], names, reduction, to_new)[0]


@asynchronous
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `allreduce_`; the result is `tensor` itself."""
    names = [name_for(Kind.ALLREDUCE, name, process_set)]
    if average is None:
        begun = reduce_again(tensor, names[0], op, prescale_factor, postscale_factor, process_set, in_place=True)
        if begun is not None:
            return begun
    reduction = reduction_for(Kind.ALLREDUCE, names, op, average, prescale_factor, postscale_factor, process_set)
    return start_allreduce([tensor], names, reduction, to_same)[0]


@asynchronous
def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `grouped_allreduce`; the result is a tuple of new tensors."""
    names = names_of_group("grouped_allreduce", name, tensors, process_set)
    reduction = reduction_for(Kind.ALLREDUCE, names, op, average, prescale_factor, postscale_factor, process_set)
    return GroupHandle(start_allreduce(tensors, names, reduction, to_new), tuple)


@asynchronous
def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `grouped_allreduce_`; the result is the tuple of `tensors`."""
    names = names_of_group("grouped_allreduce", name, tensors, process_set)
    reduction = reduction_for(Kind.ALLREDUCE, names, op, average, prescale_factor, postscale_factor, process_set)
    return GroupHandle(start_allreduce(tensors, names, reduction, to_same), tuple)


@asynchronous
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Start `reducescatter`."""
    names = [name_for(Kind.REDUCESCATTER, name, process_set)]
    reduction = reduction_for(Kind.REDUCESCATTER, names, op, None, prescale_factor, postscale_factor, process_set)
    return start_reducescatter([tensor], names, reduction)[0]


@asynchronous
def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Start `grouped_reducescatter`; the result is a tuple."""
    names = names_of_group("grouped_reducescatter", name, tensors, process_set)
    reduction = reduction_for(Kind.REDUCESCATTER, names, op, None, prescale_factor, postscale_factor, process_set)
    return GroupHandle(start_reducescatter(tensors, names, reduction), tuple)


# Moving data


@asynchronous
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `allgather`."""
    return start_allgather([tensor], [name_for(Kind.ALLGATHER, name, process_set)], process_set)[0]


@asynchronous
def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `grouped_allgather`; the result is a tuple."""
    names = names_of_group("grouped_allgather", name, tensors, process_set)
    return GroupHandle(start_allgather(tensors, names, process_set), tuple)


@asynchronous
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `broadcast`; the result is a new tensor."""
    return start_broadcast(tensor, root_rank, name_for(Kind.BROADCAST, name, process_set), process_set, to_new)


@asynchronous
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `broadcast_`; the result is `tensor` itself."""
    return start_broadcast(tensor, root_rank, name_for(Kind.BROADCAST, name, process_set), process_set, to_same)


@asynchronous
def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `alltoall`. The handle's result is always the pair (tensor, received splits)."""
    return start_alltoall(tensor, splits, name_for(Kind.ALLTOALL, name, process_set), process_set)


# The forms that wait


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Like `allreduce`, into `tensor`, which is also returned. Leaves that require grad are welcome."""
    name = name_for(Kind.ALLREDUCE, name, process_set)
    if average is None:
        output = reduce_at_once(tensor, name, op, prescale_factor, postscale_factor, process_set, in_place=True)
        if output is not None:
            return output
    reduction = reduction_for(Kind.ALLREDUCE, [name], op, average, prescale_factor, postscale_factor, process_set)
    reduced: torch.Tensor = start_allreduce([tensor], [name], reduction, to_same)[0].wait()
    return reduced


grouped_allreduce_ = synchronous(
    grouped_allreduce_async_, "Like `grouped_allreduce`, into `tensors`; returns the tuple of them."
)
broadcast_ = synchronous(
    broadcast_async_,
    "Like `broadcast`, into `tensor`, which is also returned. Leaves that require grad are welcome.",
)


# What the above and `autograd` are made of: tensors to items, items to the core


def start_allreduce(
    tensors: Tensors, names: Sequence[str], reduction: Reduction, into: Callable[[torch.Tensor], Item]
) -> list[Handle]:
    """Start an allreduce, or a group of them; `into` says where the results go."""
    op, prescale, postscale, process_set = reduction
    with refusing(Kind.ALLREDUCE, names, process_set):
        items = [into(tensor) for tensor in tensors]
    return start(Kind.ALLREDUCE, names, items, process_set, op=op, prescale=prescale, postscale=postscale)


def start_reducescatter(tensors: Tensors, names: Sequence[str], reduction: Reduction) -> list[Handle]:
    """Start a reducescatter, or a group of them."""
    op, prescale, postscale, process_set = reduction
    with refusing(Kind.REDUCESCATTER, names, process_set):
        place, size = process_set.rank(), process_set.size()
        assert place is not None and size is not None  # refusing() has looked the set up
        items = []
        for tensor in tensors:
            source = as_source(tensor)
            rows = split_rows(source.shape[0], size)[place] if source.ndim else 0
            output = torch.empty((rows, *source.shape[1:]), dtype=tensor.dtype, device="cpu")
            items.append(Item(source, as_array(output), value=output))
    return start(Kind.REDUCESCATTER, names, items, process_set, op=op, prescale=prescale, postscale=postscale)


def start_allgather(tensors: Tensors, names: Sequence[str], process_set: ProcessSet) -> list[Handle]:
    """Start an allgather, or a group of them."""
    with refusing(Kind.ALLGATHER, names, process_set):
        items = [to_gathered(tensor) for tensor in tensors]
    return start(Kind.ALLGATHER, names, items, process_set)


def start_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str, process_set: ProcessSet, into: Callable[[torch.Tensor], Item]
) -> Handle:
    """Start a broadcast; `into` says where the result goes."""
    with refusing(Kind.BROADCAST, [name], process_set):
        item = into(tensor)
    return start(Kind.BROADCAST, [name], [item], process_set, root_rank=root_rank)[0]


def start_alltoall(tensor: torch.Tensor, splits: Any, name: str, process_set: ProcessSet) -> Handle:
    """Start an alltoall; the handle's result is the pair (tensor, received splits)."""
    with refusing(Kind.ALLTOALL, [name], process_set):
        source = as_source(tensor)
        rows = as_splits(splits)
    # The received splits look like those that were given.
    dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32

    def with_splits(pair: tuple[torch.Tensor, np.ndarray[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        return pair[0], torch.from_numpy(pair[1]).to(dtype)

    item = Item(source, allocate=functools.partial(allocate, tensor.dtype), convert=with_splits)
    return start(Kind.ALLTOALL, [name], [item], process_set, splits=rows)[0]


def names_of_group(kind: str, name: str | None, tensors: Tensors, process_set: ProcessSet) -> list[str]:
    """Return the names under which the members of a group travel."""
    base = name_for(kind, name, process_set)
    if not isinstance(tensors, Sequence) or not tensors:
        raise InvalidRequestError(f"{kind} {base!r}: expected a list of at least one tensor, got {tensors!r:.80}")
    return group_names(base, len(tensors))
