"""The public operations, with Horovod's parameters. They take what `tf.convert_to_tensor` takes.

They work eagerly, inside `tf.function` and in graphs; several may be under way at once inside one function. Each is
collective over its process set. `name` must be equal on all ranks and is needed only where they call in different
orders; `ignore_name_scope` drops name scopes from the names that graphs give. Errors: docs/tensorflow.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite import Average, InvalidRequestError, ProcessSet, global_process_set
from hvdlite.lowlevel import Kind, group_names, refusing

from .autograph import plain_python
from .compression import Compression, Compressor, check_compressor
from .errors import as_tensorflows
from .naming import operation_name
from .ops import (
    Reduction,
    Tensors,
    broadcast_tensor,
    exchange_rows,
    gather_tensors,
    reduce_tensors,
    reduction_for,
    scatter_tensors,
)
from .sparse import reduce_slices
from .tensors import as_tensor


@plain_python
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return postscale * reduce(prescale * tensor) over the ranks of the set: the same bits on all of them.

    Differentiable for Sum and Average: the gradient is reduced in the same way.

    Args:
        tensor: any shape; shape and dtype equal on all ranks. Of `tf.IndexedSlices` all ranks' slices come back
            (Sum, or Average of the values); how many there are may differ, and be 0.
        average: Horovod's old way to say op=Average (True) or op=Sum (False).
        device_dense, device_sparse: for `tf.device`; the reduction itself runs in host memory.
        compression: what the tensor is turned into to travel.
        op: Average (default), Sum, Min, Max, Product or Adasum. Averages of integers truncate towards zero;
            float16 and bfloat16 are added in float32 and rounded once.
    """
    if isinstance(tensor, tf.IndexedSlices):
        kept = operation_name("allreduce", name, tensor.values, ignore_name_scope, process_set)
        names = [f"{kept}.values", f"{kept}.indices"]
        reduction = reduction_for(Kind.ALLGATHER, names, op, average, prescale_factor, postscale_factor, process_set)
        with tf.device(device_sparse or None):
            return reduce_slices(tensor, kept, reduction)
    tensors, names = _prepared(Kind.ALLREDUCE, "allreduce", [tensor], name, ignore_name_scope, process_set)
    reduction = reduction_for(Kind.ALLREDUCE, names, op, average, prescale_factor, postscale_factor, process_set)
    with tf.device(device_dense or None):
        return _compressed(Kind.ALLREDUCE, tensors, names, reduction, compression)[0]


@plain_python
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """Like `allreduce` on each of `tensors`, which become ready together: all are reduced, or all raise.

    Dtypes may differ, and `tf.IndexedSlices` may be among them. An empty list is returned as it is.
    """
    if not tensors:
        return tensors
    slices = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    results: list[Any] = [None] * len(tensors)
    dense = [i for i in range(len(tensors)) if i not in slices]
    if dense:
        prepared, names = _prepared(
            Kind.ALLREDUCE, "grouped_allreduce", [tensors[i] for i in dense], name, ignore_name_scope, process_set
        )
        reduction = reduction_for(Kind.ALLREDUCE, names, op, average, prescale_factor, postscale_factor, process_set)
        with tf.device(device_dense or None):
            reduced = _compressed(Kind.ALLREDUCE, prepared, names, reduction, compression)
        for i, one in zip(dense, reduced, strict=True):
            results[i] = one
    for i in slices:
        own = None if name is None else f"{name}_{i + 1}of{len(tensors)}"
        results[i] = allreduce(
            tensors[i], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor, own,
            process_set, ignore_name_scope,
        )  # fmt: skip
    return results


@plain_python
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order. Differentiable.

    Args:
        tensor: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype may not.
    """
    tensors, names = _prepared(Kind.ALLGATHER, "allgather", [tensor], name, ignore_name_scope, process_set)
    return gather_tensors(tensors, names, process_set)[0]


@plain_python
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Like `allgather` on each of `tensors`, which become ready together. An empty list is returned as it is."""
    if not tensors:
        return tensors
    prepared, names = _prepared(Kind.ALLGATHER, "grouped_allgather", tensors, name, ignore_name_scope, process_set)
    return gather_tensors(prepared, names, process_set)


@plain_python
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return `tensor` of rank `root_rank` on all ranks. Differentiable: the root gets the average gradient.

    Args:
        tensor: shape and dtype equal on all ranks; the values count on the root only.
        root_rank: a global rank, also within a process set.
    """
    tensors, names = _prepared(Kind.BROADCAST, "broadcast", [tensor], name, ignore_name_scope, process_set)
    return broadcast_tensor(tensors[0], root_rank, names[0], process_set)


@plain_python
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to every rank, and return the rows that came from them, in rank order. Differentiable.

    Args:
        tensor: at least one dimension; all but the first are equal on all ranks, as is the dtype.
        splits: rows for each rank of the set, integers; may be 0, and rows beyond their sum stay here. None cuts
            evenly.

    Returns:
        The tensor; with `splits` the pair (tensor, received splits as int32).
    """
    tensors, names = _prepared(Kind.ALLTOALL, "alltoall", [tensor], name, ignore_name_scope, process_set)
    rows = None if splits is None else _as_splits(splits, names, process_set)
    received, counts = exchange_rows(tensors[0], rows, names[0], process_set)
    return received if splits is None else (received, counts)


@plain_python
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce `tensor` over the ranks, and return this rank's rows of the result. Differentiable.

    Args:
        tensor: at least one dimension; shape and dtype equal on all ranks. Of its n rows, the first n % size
            ranks get n // size + 1 and the others n // size, in rank order.
        op: Average (default) or Sum.
    """
    tensors, names = _prepared(Kind.REDUCESCATTER, "reducescatter", [tensor], name, ignore_name_scope, process_set)
    reduction = reduction_for(Kind.REDUCESCATTER, names, op, None, prescale_factor, postscale_factor, process_set)
    with tf.device(device_dense or None):
        return _compressed(Kind.REDUCESCATTER, tensors, names, reduction, compression)[0]


@plain_python
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Like `reducescatter` on each of `tensors`, which become ready together. An empty list is returned as it is."""
    if not tensors:
        return tensors
    prepared, names = _prepared(Kind.REDUCESCATTER, "grouped_reducescatter", tensors, None, False, process_set)
    reduction = reduction_for(Kind.REDUCESCATTER, names, op, None, prescale_factor, postscale_factor, process_set)
    with tf.device(device_dense or None):
        return _compressed(Kind.REDUCESCATTER, prepared, names, reduction, compression)


def _prepared(
    kind: Kind, words: str, values: Sequence[Any], name: str | None, ignore_scope: bool, process_set: ProcessSet
) -> tuple[Tensors, list[str]]:
    """Return the tensors and the names under which they travel. If they are none, the other ranks hear of it, too."""
    with as_tensorflows():
        tensors: list[tf.Tensor] = []
        problem: Exception | None = None
        for value in values:
            try:
                tensors.append(as_tensor(value))
            except InvalidRequestError as error:
                problem = problem or error
        first = tensors[0] if tensors else tf.constant(0)
        base = operation_name(words, name, first, ignore_scope, process_set)
        names = group_names(base, len(values)) if words.startswith("grouped_") else [base]
        if problem is not None:
            with refusing(kind, names, process_set):
                raise problem
        return tensors, names


def _as_splits(splits: Any, names: Sequence[str], process_set: ProcessSet) -> tf.Tensor:
    with as_tensorflows(), refusing(Kind.ALLTOALL, names, process_set):
        if not isinstance(splits, tf.Tensor) and len(splits) == 0:
            return tf.zeros([0], tf.int32)
        return as_tensor(splits)


def _compressed(
    kind: Kind, tensors: Tensors, names: Sequence[str], reduction: Reduction, compression: type[Compressor]
) -> list[tf.Tensor]:
    """Compress, reduce, decompress."""
    with as_tensorflows(), refusing(kind, names, reduction.process_set):
        check_compressor(compression)
        pairs = [compression.compress(tensor) for tensor in tensors]
    reduce = reduce_tensors if kind is Kind.ALLREDUCE else scatter_tensors
    reduced = reduce([tensor for tensor, _ in pairs], names, reduction)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]
