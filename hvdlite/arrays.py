"""Into NumPy and back: what the public functions accept besides NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.dtypes import canonical
from hvdlite.errors import InvalidRequestError

Array = NDArray[Any]


def as_array(tensor: Any) -> Array:
    """Return `tensor` as a NumPy array that shares its memory where that is possible.

    Accepts NumPy arrays, numbers and nested lists of them, and objects that speak DLPack, the array
    interface or the buffer protocol, in host memory.

    Raises:
        UnsupportedDtypeError: its elements cannot be communicated.
    """
    if isinstance(tensor, np.ndarray):
        array = tensor
    elif hasattr(tensor, "__dlpack__") and not isinstance(tensor, np.generic):
        array = _from_dlpack(tensor)
    else:
        array = np.asarray(tensor)
    dtype = canonical(array.dtype)
    return array if array.dtype == dtype else array.astype(dtype)


def _from_dlpack(tensor: Any) -> Array:
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # which one depends on the library
        raise InvalidRequestError(f"{type(tensor).__name__} cannot be read through DLPack: {error}") from error


def contiguous(array: Array) -> Array:
    """Return `array`, or a C-contiguous copy of the same shape."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)


def writable(tensor: Any, call: str) -> Array:
    """Return memory of `tensor` that the result may be written to.

    Raises:
        InvalidRequestError: it is read-only, or not memory at all.
    """
    if not (isinstance(tensor, np.ndarray) or hasattr(tensor, "__dlpack__")):
        raise InvalidRequestError(f"{call}: {type(tensor).__name__} cannot be changed in place; give an array.")
    array = as_array(tensor)
    if not array.flags.writeable or (isinstance(tensor, np.ndarray) and array is not tensor):
        raise InvalidRequestError(f"{call}: the array is read-only, or not of native byte order; give a copy.")
    return array
