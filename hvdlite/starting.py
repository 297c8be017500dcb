"""From the arrays of a call to operations that are under way: what `hvdlite.api` is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.arrays import Array, as_array, contiguous, writable
from hvdlite.at_once import reduce_array_at_once
from hvdlite.engine.handle import Handle
from hvdlite.errors import InvalidRequestError
from hvdlite.lowlevel import (
    Item,
    Kind,
    group_names,
    name_for,
    refusing,
    resolve_op,
    split_rows,
    start,
)
from hvdlite.process_set import ProcessSet


def start_allreduce(
    tensors: Sequence[Any],
    names: Sequence[str],
    how: tuple[int | None, bool | None],
    factors: tuple[float, float],
    process_set: ProcessSet,
    into: Callable[[Any, str], Item],
) -> list[Handle]:
    """Start an allreduce, or a group of them; `into` says where the results go."""
    with refusing(Kind.ALLREDUCE, names, process_set):
        op = resolve_op(*how)
        items = [into(tensor, "allreduce_") for tensor in tensors]
    return start(Kind.ALLREDUCE, names, items, process_set, op=op, prescale=factors[0], postscale=factors[1])


def allreduce_and_wait(
    tensor: Any,
    average: bool | None,
    name: str | None,
    op: int | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    in_place: bool,
) -> Any:
    """Return the allreduced tensor, by the shortest way that leads there."""
    name = name_for(Kind.ALLREDUCE, name, process_set)
    if average is None:
        output = reduce_array_at_once(tensor, name, op, *factors, process_set, in_place)
        if output is not None:
            return output
    into = to_same if in_place else to_new
    return start_allreduce([tensor], [name], (op, average), factors, process_set, into)[0].wait()


def start_reducescatter(
    tensors: Sequence[Any], names: Sequence[str], op: int, factors: tuple[float, float], process_set: ProcessSet
) -> list[Handle]:
    """Start a reducescatter, or a group of them."""
    with refusing(Kind.REDUCESCATTER, names, process_set):
        reduction = resolve_op(op, None)
        place, size = process_set.rank(), process_set.size()
        assert place is not None and size is not None  # refusing() has looked the set up
        items = []
        for tensor in tensors:
            source = contiguous(as_array(tensor))
            rows = split_rows(source.shape[0], size)[place] if source.ndim else 0
            target = np.empty((rows, *source.shape[1:]), source.dtype)
            items.append(Item(source, target, value=target))
    return start(
        Kind.REDUCESCATTER, names, items, process_set,
        op=reduction, prescale=factors[0], postscale=factors[1],
    )  # fmt: skip


def start_allgather(tensors: Sequence[Any], names: Sequence[str], process_set: ProcessSet) -> list[Handle]:
    """Start an allgather, or a group of them."""
    with refusing(Kind.ALLGATHER, names, process_set):
        sources = [contiguous(as_array(tensor)) for tensor in tensors]
    items = [Item(source, allocate=functools.partial(allocate, source.dtype)) for source in sources]
    return start(Kind.ALLGATHER, names, items, process_set)


def start_broadcast(
    tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, into: Callable[[Any, str], Item]
) -> Handle:
    """Start a broadcast; `into` says where the result goes."""
    names = [name_for(Kind.BROADCAST, name, process_set)]
    with refusing(Kind.BROADCAST, names, process_set):
        item = into(tensor, "broadcast_")
    return start(Kind.BROADCAST, names, [item], process_set, root_rank=root_rank)[0]


def to_new(tensor: Any, call: str) -> Item:
    """Return the Item whose result is a new array of the same shape."""
    source = contiguous(as_array(tensor))
    target = np.empty(source.shape, source.dtype)
    return Item(source, target, value=target)


def to_same(tensor: Any, call: str) -> Item:
    """Return the Item whose result is `tensor` itself, overwritten."""
    array = writable(tensor, call)
    if array.flags.c_contiguous:
        return Item(array, array, value=tensor)
    copy = contiguous(array)

    def put_back(_: Any) -> Any:
        np.copyto(array, copy)
        return tensor

    return Item(copy, copy, convert=put_back)


def allocate(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Return flat memory for a result of `shape`, and the array over it."""
    array = np.empty(shape, dtype)
    return array.reshape(-1), array


def with_int32_splits(pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return an alltoall's result with the received splits as users expect them."""
    return pair[0], pair[1].astype(np.int32)


def as_splits(splits: Any) -> list[int]:
    """Return alltoall's `splits` as integers."""
    array = np.asarray(splits)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(f"alltoall: splits={splits!r}: expected one integer for each rank.")
    return [int(n) for n in array]


def names_of_group(kind: str, name: str | None, tensors: Sequence[Any], process_set: ProcessSet) -> list[str]:
    """Return the names under which the members of a group travel."""
    base = name_for(kind, name, process_set)
    if not isinstance(tensors, Sequence) or not tensors:
        raise InvalidRequestError(f"{kind} {base!r}: expected a list of at least one tensor, got {tensors!r:.80}")
    return group_names(base, len(tensors))
