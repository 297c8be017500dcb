"""Reduction of `tf.IndexedSlices`: every rank gets the slices of all ranks, by allgather.

    bytes received per rank    sum over the ranks of slices * (bytes of an index + bytes of a slice)

Worth it while that is less than the dense tensor.
"""

from __future__ import annotations

import tensorflow as tf

from hvdlite import InvalidRequestError
from hvdlite.lowlevel import Kind, ReduceOp, refusing

from .errors import as_tensorflows
from .ops import Reduction, gather_tensors


class _NotForSlicesError(InvalidRequestError, NotImplementedError):
    """What Horovod raises here."""


def reduce_slices(slices: tf.IndexedSlices, name: str, reduction: Reduction) -> tf.IndexedSlices:
    """Return the slices of all ranks, in rank order; an index may come more than once, and its slices add up.

    Args:
        slices: how many there are may differ between ranks, and be 0.
        name: two tensors travel, as `<name>.values` and `<name>.indices`.
        reduction: Sum, or Average, which divides the values; without factors.
    """
    op, prescale, postscale, process_set = reduction
    names = [f"{name}.values", f"{name}.indices"]
    with as_tensorflows(), refusing(Kind.ALLGATHER, names, process_set):
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise _NotForSlicesError(f"allreduce of IndexedSlices {name!r}: op={op.name.title()}: Sum or Average only.")
        if (prescale, postscale) != (1.0, 1.0):
            raise _NotForSlicesError(
                f"allreduce of IndexedSlices {name!r}: prescale_factor={prescale}, postscale_factor={postscale}: "
                "scale the values yourself, or make it dense with tf.convert_to_tensor()."
            )
        values = slices.values
        if op is ReduceOp.AVERAGE:
            values = values / tf.cast(process_set.size(), values.dtype)
    values, indices = gather_tensors([values, slices.indices], names, process_set)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)
