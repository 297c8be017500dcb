"""Exact conversion between 16-bit floats and float32, faster than the casts of NumPy and ml_dtypes.

Works on blocks: callers keep them small enough (64 K elements) that the scratch stays in the cache.
GB/s of half-type bytes on one core of a Xeon, 64 K elements, against the plain cast:

    bfloat16   widen  8.4 against 4.7    narrow 2.5 against 1.6
    float16    widen  4.8 against 1.4    narrow 0.8 against 0.5

NumPy's float16 cast runs in software, one element at a time; the integer tricks here vectorise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.dtypes import BFLOAT16

Array = NDArray[Any]

_F16_INFINITY = 0x7C00
# float16 bits moved 13 to the left are a float32 whose exponent is 127 - 15 too small.
_F16_REBIAS = np.float32(2.0**112)
_F16_SIGN_AND_VALUE = np.int32(-0x70002000)  # the sign and the 15 bits below the three copies of it
_TO_INFINITY, _BACK = np.float32(2.0**112), np.float32(2.0**-110)


class HalfConverter:
    """Converts blocks of at most `block` elements. Owns the scratch, so belongs to one thread."""

    def __init__(self, block: int) -> None:
        self._bits = np.empty(block, np.uint32)
        self._bias = np.empty(block, np.uint32)

    def widen(self, half: Array, out: Array) -> None:
        """Write float16 or bfloat16 values to `out` (float32, not overlapping). Exact."""
        if half.dtype == BFLOAT16:
            bits = out.view(np.uint32)
            np.copyto(bits, half.view(np.uint16))
            np.left_shift(bits, 16, out=bits)
        elif _has_nonfinite_f16(half):
            np.copyto(out, half)
        else:
            signed = out.view(np.int32)
            np.copyto(signed, half.view(np.int16))
            np.left_shift(signed, 13, out=signed)
            np.bitwise_and(signed, _F16_SIGN_AND_VALUE, out=signed)
            np.multiply(out, _F16_REBIAS, out=out)

    def narrow(self, wide: Array, out: Array) -> None:
        """Round float32 values to `out` (float16 or bfloat16), to nearest, ties to even. NaN stays NaN."""
        if wide.size == 0:
            return
        if np.isnan(wide.max()):  # the integer tricks would turn some NaN into infinities
            with np.errstate(all="ignore"):
                np.copyto(out, wide, casting="unsafe")
        elif out.dtype == BFLOAT16:
            self._narrow_bfloat16(wide.view(np.uint32), out.view(np.uint16))
        else:
            self._narrow_float16(wide.view(np.uint32), out.view(np.uint16))

    def _narrow_bfloat16(self, wide: Array, out: Array) -> None:
        bits = self._bits[: wide.size]
        np.right_shift(wide, 16, out=bits)
        np.bitwise_and(bits, 1, out=bits)  # 1 where the kept part is odd: a tie then rounds up
        np.add(bits, wide, out=bits)
        np.add(bits, 0x7FFF, out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(out, bits, casting="unsafe")

    def _narrow_float16(self, wide: Array, out: Array) -> None:
        """Let a float32 addition do the rounding: add the power of two whose last place is float16's.

        Source: M. Dukhan's FP16 conversion formulas. Free of subnormal operands, which cost
        150 cycles each, and independent of the processor's flush-to-zero mode for float16's range.
        """
        bits, bias = self._bits[: wide.size], self._bias[: wide.size]
        value = bits.view(np.float32)
        np.bitwise_and(wide, 0x7FFFFFFF, out=bits)
        with np.errstate(all="ignore"):
            np.multiply(value, _TO_INFINITY, out=value)  # what float16 cannot hold becomes infinite
            np.multiply(value, _BACK, out=value)
        np.bitwise_and(wide, 0x7F800000, out=bias)
        np.maximum(bias, 0x38800000, out=bias)  # below float16's normal range the last place is fixed
        np.add(bias, 0x07800000, out=bias)
        np.add(value, bias.view(np.float32), out=value)
        np.right_shift(bits, 13, out=bias)
        np.bitwise_and(bias, 0x7C00, out=bias)
        np.bitwise_and(bits, 0x0FFF, out=bits)
        np.add(bits, bias, out=bits)
        np.right_shift(wide, 16, out=bias)
        np.bitwise_and(bias, 0x8000, out=bias)
        np.bitwise_or(bits, bias, out=bits)
        np.copyto(out, bits, casting="unsafe")


def _has_nonfinite_f16(half: Array) -> bool:
    if half.size == 0:
        return False
    # Infinities and NaN have the largest bits: of the positive values as int16, of all as uint16.
    positive, any_sign = half.view(np.int16).max(), half.view(np.uint16).max()
    return bool(positive >= _F16_INFINITY or any_sign >= 0x8000 | _F16_INFINITY)
