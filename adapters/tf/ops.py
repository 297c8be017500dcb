"""The operations on dense tensors, eager and in graphs, each with its gradient.

All are collective over their process set. Gradients are collective as well: every rank must compute them. The gradient
of an operation named `x` travels as `x.gradient`. Averages, not sums, of the ranks' gradients come back from allgather
and broadcast, as in Horovod: right for a loss that is itself averaged over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdlite import InvalidRequestError, ProcessSet, rank
from hvdlite.lowlevel import (
    GroupHandle,
    Item,
    Kind,
    ReduceOp,
    refusing,
    resolve_op,
    split_rows,
    start,
)

from .crossing import Started, run
from .errors import as_tensorflows
from .memory import pool

Array = NDArray[Any]
Tensors = Sequence[tf.Tensor]


class Reduction(NamedTuple):
    """What a reduction computes: postscale * op(prescale * tensor) over the ranks of a set."""

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet

    def with_op(self, op: ReduceOp) -> Reduction:
        return self._replace(op=op)


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
    with as_tensorflows():
        try:
            return Reduction(resolve_op(op, average), prescale, postscale, process_set)
        except InvalidRequestError:
            with refusing(kind, names, process_set):
                raise


# The operations, by their names on the wire


def reduce_tensors(tensors: Tensors, names: Sequence[str], reduction: Reduction) -> list[tf.Tensor]:
    """Allreduce one tensor, or a group that becomes ready as one."""

    def begin(arrays: Sequence[Array]) -> Started:
        return start_allreduce(arrays, names, reduction)

    def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
        if reduction.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise InvalidRequestError(
                f"allreduce of tensor {names[0]!r}: op={reduction.op.name.title()} has no gradient here. "
                "Use Sum or Average where one is needed, or tf.stop_gradient()."
            )
        return reduce_tensors(_dense(upstream), _gradient_names(names), reduction)

    return _differentiable(begin, tensors, [t.shape for t in tensors], names, gradient)


def scatter_tensors(tensors: Tensors, names: Sequence[str], reduction: Reduction) -> list[tf.Tensor]:
    """Reducescatter one tensor, or a group."""

    def begin(arrays: Sequence[Array]) -> Started:
        return start_reducescatter(arrays, names, reduction)

    def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
        op, prescale, postscale, process_set = reduction
        factor = prescale * postscale * (_size(process_set) if op is ReduceOp.SUM else 1)
        scaled = [g * tf.cast(factor, g.dtype) for g in _dense(upstream)]
        return gather_tensors(scaled, _gradient_names(names), process_set)

    return _differentiable(begin, tensors, [_any_rows(t.shape) for t in tensors], names, gradient)


def gather_tensors(tensors: Tensors, names: Sequence[str], process_set: ProcessSet) -> list[tf.Tensor]:
    """Allgather one tensor, or a group."""

    def begin(arrays: Sequence[Array]) -> Started:
        return start_allgather(arrays, names, process_set)

    def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
        gradients = _gradient_names(names)
        average = Reduction(ReduceOp.AVERAGE, 1.0, 1.0, process_set)
        averages = reduce_tensors(_dense(upstream), gradients, average)
        mine = tf.stack([tf.shape(t, tf.int64)[0] for t in tensors])
        everyone = gather_tensors([mine[tf.newaxis]], [f"{gradients[0]}.rows"], process_set)[0]
        starts = tf.reduce_sum(everyone[: process_set.rank()], axis=0)
        return [g[starts[i] : starts[i] + mine[i]] for i, g in enumerate(averages)]

    return _differentiable(begin, tensors, [_any_rows(t.shape) for t in tensors], names, gradient)


def broadcast_tensor(tensor: tf.Tensor, root_rank: int, name: str, process_set: ProcessSet) -> tf.Tensor:
    """Broadcast one tensor."""

    def begin(arrays: Sequence[Array]) -> Started:
        return start_broadcasts(arrays, root_rank, [name], process_set)

    def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
        average = Reduction(ReduceOp.AVERAGE, 1.0, 1.0, process_set)
        reduced = reduce_tensors(_dense(upstream), _gradient_names([name]), average)[0]
        return [reduced if rank() == root_rank else tf.zeros_like(reduced)]

    return _differentiable(begin, [tensor], [tensor.shape], [name], gradient)[0]


def exchange_rows(
    tensor: tf.Tensor, splits: tf.Tensor | None, name: str, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor]:
    """Alltoall. Returns the rows that came, and how many came from each rank, int32."""
    inputs = [tensor] if splits is None else [tensor, splits]

    def begin(arrays: Sequence[Array]) -> Started:
        return start_alltoall(arrays[0], arrays[1] if len(arrays) > 1 else None, name, process_set)

    def exchange(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        outputs = run(begin, given, [tensor.dtype, tf.int32], [_any_rows(tensor.shape), [None]], name)

        def gradient(upstream: tf.Tensor, _: Any) -> list[tf.Tensor | None]:
            (back,) = _dense([upstream])
            back, _ = exchange_rows(back, outputs[1], f"{name}.gradient", process_set)
            kept = tf.shape(tensor)[0] - tf.shape(back)[0]  # rows that were not sent had no influence
            rest = tf.zeros(tf.concat([[kept], tf.shape(tensor)[1:]], 0), back.dtype)
            return [tf.concat([back, rest], 0), *[None] * (len(given) - 1)]

        return outputs, gradient

    received, counts = tf.custom_gradient(exchange)(*inputs)
    return received, counts


# What starts them, on arrays


def start_allreduce(
    arrays: Sequence[Array], names: Sequence[str], reduction: Reduction, grouped: bool = True
) -> GroupHandle:
    """Start an allreduce of each array; `grouped` as of `hvdlite.lowlevel.start`."""
    op, prescale, postscale, process_set = reduction
    items = [_to_new(array) for array in arrays]
    return GroupHandle(
        start(Kind.ALLREDUCE, names, items, process_set, op=op, prescale=prescale, postscale=postscale, grouped=grouped)
    )


def start_reducescatter(arrays: Sequence[Array], names: Sequence[str], reduction: Reduction) -> GroupHandle:
    """Start a reducescatter, or a group of them."""
    op, prescale, postscale, process_set = reduction
    with refusing(Kind.REDUCESCATTER, names, process_set):
        place, size = process_set.rank(), _size(process_set)
        assert place is not None  # refusing() has looked the set up
        items = []
        for array in arrays:
            rows = split_rows(array.shape[0], size)[place] if array.ndim else 0
            output = pool.take((rows, *array.shape[1:]), array.dtype)
            items.append(Item(array, output, value=output))
    return GroupHandle(
        start(Kind.REDUCESCATTER, names, items, process_set, op=op, prescale=prescale, postscale=postscale)
    )


def start_allgather(arrays: Sequence[Array], names: Sequence[str], process_set: ProcessSet) -> GroupHandle:
    """Start an allgather, or a group of them."""
    items = [Item(array, allocate=_allocator(array.dtype)) for array in arrays]
    return GroupHandle(start(Kind.ALLGATHER, names, items, process_set))


def start_broadcasts(
    arrays: Sequence[Array], root_rank: int, names: Sequence[str], process_set: ProcessSet
) -> GroupHandle:
    """Start broadcasts that have nothing to do with each other."""
    items = [_to_new(array) for array in arrays]
    return GroupHandle(start(Kind.BROADCAST, names, items, process_set, root_rank=root_rank, grouped=False))


def start_alltoall(array: Array, splits: Array | None, name: str, process_set: ProcessSet) -> GroupHandle:
    """Start an alltoall; the results are the rows, and the received splits as int32."""
    with refusing(Kind.ALLTOALL, [name], process_set):
        rows = None if splits is None else _as_rows(splits)
    item = Item(array, allocate=_allocator(array.dtype))
    handles = start(Kind.ALLTOALL, [name], [item], process_set, splits=rows)

    def with_splits(results: list[Any]) -> list[Array]:
        received, counts = results[0]
        return [received, np.asarray(counts, np.int32)]

    return GroupHandle(handles, with_splits)


def _differentiable(
    begin: Callable[[Sequence[Array]], Started],
    tensors: Tensors,
    shapes: Sequence[Any],
    names: Sequence[str],
    gradient: Callable[..., list[tf.Tensor]],
) -> list[tf.Tensor]:
    dtypes = [t.dtype for t in tensors]

    def operate(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        return run(begin, given, dtypes, shapes, names[0]), gradient

    if not any(dtype.is_floating or dtype.is_complex for dtype in dtypes):
        return operate(*tensors)[0]
    return list(tf.custom_gradient(operate)(*tensors))


def _to_new(array: Array) -> Item:
    output = pool.take(array.shape, array.dtype)
    return Item(array, output, value=output)


def _allocator(dtype: np.dtype[Any]) -> Callable[[tuple[int, ...]], tuple[Array, Array]]:
    def allocate(shape: tuple[int, ...]) -> tuple[Array, Array]:
        output = pool.take(shape, dtype)
        return output.reshape(-1), output

    return allocate


def _as_rows(splits: Array) -> list[int]:
    if splits.ndim != 1 or (splits.size and splits.dtype.kind not in "iu"):
        raise InvalidRequestError(f"alltoall: splits={splits!r}: expected one integer for each rank.")
    return [int(n) for n in splits]


def _any_rows(shape: tf.TensorShape) -> Any:
    return None if shape.rank is None else [None, *shape.as_list()[1:]]


def _size(process_set: ProcessSet) -> int:
    size = process_set.size()
    assert size is not None
    return size


def _dense(gradients: Sequence[Any]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


def _gradient_names(names: Sequence[str]) -> list[str]:
    return [f"{name}.gradient" for name in names]
