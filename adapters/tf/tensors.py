"""Between TensorFlow's values and arrays over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdlite import InvalidRequestError, UnsupportedDtypeError
from hvdlite.lowlevel import BFLOAT16

Array = NDArray[Any]

_NAMES = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 complex128"
_SUPPORTED = frozenset(tf.as_dtype(name) for name in _NAMES.split())
_BY_DLPACK = 1024  # bytes from which handing memory over beats copying it


def as_tensor(value: Any) -> tf.Tensor:
    """Return `value` as a tensor: from a variable of TensorFlow or Keras, an array, a number, a list.

    Raises:
        InvalidRequestError: it cannot become one.
        UnsupportedDtypeError: its elements cannot be communicated.
    """
    if not isinstance(value, tf.Tensor):
        try:
            value = tf.convert_to_tensor(value)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"expected a tensor, or what TensorFlow can make one of, got {type(value).__name__}: {value!r:.80}"
            ) from error
    if value.dtype not in _SUPPORTED:
        raise UnsupportedDtypeError(
            f"{describe(value)}: this dtype cannot be communicated; use one of {', '.join(sorted(_NAMES.split()))}."
        )
    return value


def as_array(tensor: tf.Tensor) -> Array:
    """Return the array over the memory of an eager tensor. It must not be written."""
    array: Array = np.asarray(tensor if tensor.ndim else tensor.numpy())  # which fails for a scalar of bfloat16
    return array


def to_tensor(array: Array) -> tf.Tensor:
    """Return the eager tensor over `array`, which comes from `memory.pool` and is not written any more."""
    if array.nbytes < _BY_DLPACK or array.dtype == np.bool_:
        return tf.constant(array)
    if array.dtype == BFLOAT16:  # which NumPy's DLPack does not know
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def describe(tensor: Any) -> str:
    """Return `float32[3, 4]`, for messages."""
    dims = "?" if tensor.shape.rank is None else ", ".join("?" if n is None else str(n) for n in tensor.shape)
    return f"{tensor.dtype.name}[{dims}]"
