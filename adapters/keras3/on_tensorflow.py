"""Keras on TensorFlow: gradients take the way of `hvdlite.tensorflow`, eager and in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite import InvalidRequestError, ProcessSet
from hvdlite.lowlevel import KeptName
from hvdlite.tensorflow.gradients import reduce_gradients, resolve
from hvdlite.tensorflow.local import VariableSet, scaled

from .settings import Settings, n_ranks

Compression = hvd.Compression
init = hvd.init
FUNCTIONAL = False
STEP_ERRORS = (tf.errors.OpError,)


class Reducer:
    """Reduces the gradients of one optimizer."""

    def __init__(self, settings: Settings) -> None:
        self._how = resolve(
            settings.op, settings.predivide, 0, settings.groups, settings.process_set,
            compression=settings.compression, sparse_as_dense=settings.sparse_as_dense,
            device_dense=settings.device_dense, device_sparse=settings.device_sparse,
        )  # fmt: skip
        self._settings = settings
        self._name = KeptName(settings.name or "keras_optimizer")
        self.local = VariableSet()

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients. Collective. Those of local variables are scaled."""
        base = self._name.get(self._settings.process_set)
        reduced: list[Any] = reduce_gradients(gradients, variables, self._how, base, self.local, self._scale)
        return reduced

    def _scale(self, gradient: Any) -> Any:
        return scaled(gradient, n_ranks(self._settings.process_set)) if self._settings.scale_local else gradient


def forget_compiled() -> None:
    """Forget compiled steps beyond those that the model has: there are none."""


def dense(gradient: Any, settings: Settings) -> Any:
    """Return a gradient that can be added up."""
    if isinstance(gradient, tf.IndexedSlices) and not settings.sparse_as_dense:
        raise InvalidRequestError(
            "backward_passes_per_step > 1 adds gradients up, but one is IndexedSlices, as of an embedding. "
            "Give sparse_as_dense=True as well."
        )
    return tf.convert_to_tensor(gradient)


def concrete(value: Any) -> bool:
    """Return whether `value` is there to be looked at."""
    del value
    return bool(tf.executing_eagerly())


def compressed(value: Any, compression: Any, reduce: Any) -> Any:
    """Return what `reduce`, on tensors of the backend, makes of a value that travels compressed."""
    tensor, context = compression.compress(tf.convert_to_tensor(value))
    return compression.decompress(reduce(tensor), context)


def allreduce(value: Any, name: str | None, op: int, prescale: float, postscale: float) -> Any:
    return hvd.allreduce(value, op=op, name=name, prescale_factor=prescale, postscale_factor=postscale)


def allgather(value: Any, name: str | None, process_set: ProcessSet) -> Any:
    return hvd.allgather(tf.convert_to_tensor(value), name=name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name, process_set=process_set)


def reducescatter(value: Any, name: str | None, op: int, process_set: ProcessSet) -> Any:
    return hvd.reducescatter(tf.convert_to_tensor(value), op=op, name=name, process_set=process_set)
