"""The dtypes that travel between ranks, and which reductions mean something on them.

bfloat16 is NumPy's view of ml_dtypes' type; everything else is NumPy's own.
"""

from __future__ import annotations

import enum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from hvdlite.errors import UnsupportedDtypeError

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_NAMES = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128"
SUPPORTED: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NAMES.split()}
SUPPORTED["bfloat16"] = BFLOAT16
_NAME_OF: dict[np.dtype[Any], str] = {dtype: name for name, dtype in SUPPORTED.items()}
_HALF = frozenset({SUPPORTED["float16"], BFLOAT16})
_FLOAT = _HALF | {SUPPORTED["float32"], SUPPORTED["float64"]}
_COMPLEX = frozenset({SUPPORTED["complex64"], SUPPORTED["complex128"]})


class ReduceOp(enum.IntEnum):
    """How values of several ranks become one. The integers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


def canonical(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the native-endian NumPy dtype, or raise `UnsupportedDtypeError`."""
    if isinstance(dtype, np.dtype) and dtype in _NAME_OF:  # hot path; a foreign byte order is not in there
        return dtype
    found = np.dtype(dtype).newbyteorder("=")
    if found not in _NAME_OF:
        raise UnsupportedDtypeError(
            f"dtype {dtype!r} cannot be communicated; use one of {', '.join(sorted(SUPPORTED))}."
        )
    return found


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name under which `dtype` travels: `float32`, `bfloat16`, …"""
    try:
        return _NAME_OF[dtype]
    except KeyError:
        return _NAME_OF[canonical(dtype)]


def find_name(dtype: np.dtype[Any]) -> str | None:
    """Return `name_of` a dtype of native byte order that can be communicated, else None."""
    return _NAME_OF.get(dtype)


def is_half(dtype: np.dtype[Any]) -> bool:
    """True for the 16-bit floats, which accumulate in float32 and are rounded once."""
    return dtype in _HALF


def is_floating(dtype: np.dtype[Any]) -> bool:
    """True for real floating point, bfloat16 included (NumPy calls its kind `V`)."""
    return dtype in _FLOAT


def is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iu"


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are added up."""
    return SUPPORTED["float32"] if dtype in _HALF else dtype


def check_reducible(dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Raise `UnsupportedDtypeError` when `op` has no meaning on `dtype`."""
    if dtype == SUPPORTED["bool"] and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise UnsupportedDtypeError(
            f"{op.name} of bool has no one meaning: use Max for 'any rank', Min for 'all ranks', "
            "or cast to int32 to count."
        )
    if op is ReduceOp.ADASUM and dtype not in _FLOAT:
        raise UnsupportedDtypeError(f"Adasum needs float16, bfloat16, float32 or float64, not {name_of(dtype)}.")
    if dtype in _COMPLEX and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UnsupportedDtypeError(f"{op.name} has no meaning on {name_of(dtype)}: complex numbers have no order.")
