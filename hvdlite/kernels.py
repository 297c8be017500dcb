"""Element arithmetic of reductions on host memory: combine, scale, round.

A narrow seam: adapters may register faster kernels per dtype (torch's for half types).
Arithmetic is Horovod's: factors of float32 and half types are rounded to float32 first,
integers are scaled in double and truncated towards zero, integer sums wrap.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.dtypes import SUPPORTED, ReduceOp, is_floating, is_half
from hvdlite.halves import HalfConverter

Array = NDArray[Any]
Combine = Callable[..., Any]  # a NumPy ufunc of two operands, called with out=
FusedReduce = Callable[[Sequence[Array], Array, float, float], None]

# Elements per block: three float32 blocks (768 KB) fit into a core's L2 cache, and a NumPy call's
# overhead of 0.5 us stays small against the 10 us that it works.
BLOCK = 64 * 1024

_FLOAT32, _FLOAT64 = SUPPORTED["float32"], SUPPORTED["float64"]


@dataclass(frozen=True, slots=True)
class Finish:
    """What happens to a reduced value before it is stored.

    Attributes:
        factor: multiplies it (half types: in float32; integers: in double, truncated towards zero).
        divisor: divides integers exactly, truncating towards zero; applied before `factor`.
    """

    factor: float = 1.0
    divisor: int = 1

    @property
    def is_identity(self) -> bool:
        return self.factor == 1.0 and self.divisor == 1


NO_FINISH = Finish()


def quiet_caller() -> Callable[..., Any]:
    """Return a function that calls `fn(*arguments)` where overflow to infinity is a result and not a warning.

    One thread at a time may be in it, and none twice. It is for calls of a few microseconds: `np.errstate` takes 2.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":  # whose setting belongs to the thread, not to the context

        def call(fn: Callable[..., Any], *arguments: Any) -> Any:
            with np.errstate(all="ignore"):
                return fn(*arguments)

        return call
    context = contextvars.Context()
    context.run(functools.partial(np.seterr, all="ignore"))
    return context.run


def flushes_subnormals() -> bool:
    """Return whether this thread takes subnormal numbers for zero, as threads of TensorFlow do, and torch's on demand.

    A sum depends on that, and float16 passes through subnormal float32 (`halves`).
    """
    return _LEAST_NORMAL * _HALF == 0.0


_LEAST_NORMAL, _HALF = sys.float_info.min, 0.5  # not written out above: Python would multiply when it compiles


class Kernels:
    """Reductions of flat, contiguous arrays. Keeps its scratch, so belongs to one thread."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._halves = HalfConverter(block)
        self._scratch: dict[tuple[np.dtype[Any], int], Array] = {}
        self._fused: dict[tuple[np.dtype[Any], ReduceOp], FusedReduce] = {}

    def register(self, dtype: np.dtype[Any], op: ReduceOp, fn: FusedReduce) -> None:
        """Use `fn(sources, out, prescale, factor)` to reduce the half type `dtype` by `op`.

        It must store round(factor * (prescale * sources[0] + prescale * sources[1] + …)) for a sum,
        computed in float32 from left to right and rounded once. `out` may be one of the sources.
        """
        self._fused[dtype, op] = fn

    def reduce(
        self, op: ReduceOp, sources: Sequence[Array], out: Array, prescale: float = 1.0, finish: Finish = NO_FINISH
    ) -> None:
        """Store finish(op over prescale * source) in `out`, combining the sources from first to last.

        Args:
            sources: at least one array of the length and dtype of `out`, which may be one of them.
        """
        with np.errstate(all="ignore"):  # overflow to infinity is a result here, not a warning
            self.fold(op, sources, out, prescale, finish)

    def fold(
        self, op: ReduceOp, sources: Sequence[Array], out: Array, prescale: float = 1.0, finish: Finish = NO_FINISH
    ) -> None:
        """Do what `reduce` does, for callers that hold `np.errstate(all="ignore")` over many calls (1 us each)."""
        if is_half(out.dtype):
            self._reduce_halves(op, sources, out, prescale, finish)
        elif prescale == 1.0 and len(sources) == 2 and (finish.is_identity or out.size <= self._block):
            combiner(op, out.dtype)(sources[0], sources[1], out=out)
            self._finish_block(out, finish)
        elif prescale == 1.0 and len(sources) == 1 and finish.is_identity:
            _copy(sources[0], out)
        else:
            self._reduce_blocks(op, sources, out, prescale, finish)

    def combine(self, op: ReduceOp, acc: Array, other: Array, *, other_first: bool = False) -> None:
        """Store `acc op other` in `acc` (`other op acc` when `other_first`: then a NaN keeps its payload)."""
        self.reduce(op, (other, acc) if other_first else (acc, other), acc)

    def scale(self, source: Array, out: Array, factor: float) -> None:
        """Store `factor * source` in `out`, which may be `source`."""
        self.reduce(ReduceOp.SUM, (source,), out, factor)

    def finish(self, array: Array, finish: Finish) -> None:
        """Apply `finish` in place."""
        if not finish.is_identity:
            self.reduce(ReduceOp.SUM, (array,), array, 1.0, finish)

    def widen(self, half: Array, out: Array) -> None:
        """Copy half-type values into the float32 array `out`. Any length."""
        for start in range(0, half.size, self._block):
            stop = start + self._block
            self._halves.widen(half[start:stop], out[start:stop])

    def narrow(self, wide: Array, out: Array) -> None:
        """Round float32 values into the half-type array `out`. Any length."""
        for start in range(0, wide.size, self._block):
            stop = start + self._block
            self._halves.narrow(wide[start:stop], out[start:stop])

    @staticmethod
    def identity(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
        """Return the value that changes nothing under `op`: what a joined rank contributes."""
        if op is ReduceOp.PRODUCT:
            return dtype.type(1)
        if op not in (ReduceOp.MIN, ReduceOp.MAX):
            return dtype.type(0)
        if dtype.kind == "b":
            return dtype.type(op is ReduceOp.MIN)
        if is_floating(dtype):
            return dtype.type(np.inf if op is ReduceOp.MIN else -np.inf)
        limits = np.iinfo(dtype)
        return dtype.type(limits.max if op is ReduceOp.MIN else limits.min)

    def _reduce_blocks(
        self, op: ReduceOp, sources: Sequence[Array], out: Array, prescale: float, finish: Finish
    ) -> None:
        combine, dtype = combiner(op, out.dtype), out.dtype
        for start in range(0, out.size, self._block):
            into = out[start : start + self._block]
            parts = [source[start : start + self._block] for source in sources]
            acc, spare = self._take(dtype, 0, into.size), self._take(dtype, 1, into.size)
            total = self._scaled(parts[0], acc, prescale)
            for part in parts[1:]:
                # `into` may be a source that is yet to come, so it is written last.
                last = part is parts[-1]
                total = combine(total, self._scaled(part, spare, prescale), out=into if last else acc)
            if total is not into:
                _copy(total, into)
            self._finish_block(into, finish)

    def _reduce_halves(
        self, op: ReduceOp, sources: Sequence[Array], out: Array, prescale: float, finish: Finish
    ) -> None:
        if len(sources) == 1 and prescale == 1.0 and finish.is_identity:
            _copy(sources[0], out)
            return
        fused = self._fused.get((out.dtype, op))
        if fused is not None:
            fused(sources, out, prescale, finish.factor)
            return
        for start in range(0, out.size, self._block):
            into = out[start : start + self._block]
            acc = self._sum_half_block(op, sources, start, into.size, prescale)
            self._finish_block(acc, finish)
            self._halves.narrow(acc, into)

    def _sum_half_block(
        self, op: ReduceOp, sources: Sequence[Array], start: int, length: int, prescale: float
    ) -> Array:
        combine = combiner(op, _FLOAT32)
        acc, spare = self._take(_FLOAT32, 0, length), self._take(_FLOAT32, 1, length)
        into = acc
        for source in sources:
            self._halves.widen(source[start : start + length], into)
            self._scaled(into, into, prescale)
            if into is spare:
                combine(acc, spare, out=acc)
            into = spare
        return acc

    def _scaled(self, source: Array, spare: Array, factor: float) -> Array:
        """Return `factor * source`, in `spare` unless there is nothing to do."""
        if factor == 1.0:
            return source
        dtype = source.dtype
        if dtype.kind == "c":
            # As pairs of reals: a product of complex numbers would turn inf * f into NaN.
            real = _FLOAT32 if dtype.itemsize == 8 else _FLOAT64
            np.multiply(source.view(real), real.type(factor), out=spare.view(real))
        elif is_floating(dtype):
            np.multiply(source, dtype.type(factor), out=spare)
        else:
            double = self._take(_FLOAT64, 2, source.size)
            np.copyto(double, source)
            np.multiply(double, factor, out=double)
            np.trunc(double, out=double)  # for bool; a cast to an integer truncates by itself
            np.copyto(spare, double, casting="unsafe")
        return spare

    def _finish_block(self, block: Array, finish: Finish) -> None:
        if finish.divisor != 1:
            self._divide(block, finish.divisor)
        self._scaled(block, block, finish.factor)

    def _divide(self, block: Array, divisor: int) -> None:
        """Divide integers exactly, truncating towards zero as C does."""
        limits = np.iinfo(block.dtype)
        if divisor <= limits.max:
            rest = self._take(block.dtype, 3, block.size)
            np.fmod(block, block.dtype.type(divisor), out=rest)  # has the dividend's sign
            np.subtract(block, rest, out=block)
            np.floor_divide(block, block.dtype.type(divisor), out=block)
        else:  # more ranks than int8 can count: nothing but -128 / 128 is not zero
            np.negative(
                block == limits.min if divisor == -int(limits.min) else block != block, out=block, dtype=block.dtype
            )

    def _take(self, dtype: np.dtype[Any], slot: int, length: int) -> Array:
        scratch = self._scratch.get((dtype, slot))
        if scratch is None:
            scratch = self._scratch[dtype, slot] = np.empty(self._block, dtype)
        return scratch[:length]


def combiner(op: ReduceOp, dtype: np.dtype[Any]) -> Combine:
    """Return the ufunc that combines two arrays. Minimum and maximum let NaN through; bool is logical."""
    if op is ReduceOp.SUM:
        return np.add
    if op is ReduceOp.MIN:
        return np.minimum
    if op is ReduceOp.MAX:
        return np.maximum
    if op is ReduceOp.PRODUCT:
        return np.logical_and if dtype.kind == "b" else np.multiply
    raise ValueError(
        f"{op!r} is not a reduction of two values: an average is SUM with a Finish, Adasum has its own rule."
    )


def _copy(source: Array, out: Array) -> None:
    if source is not out:
        np.copyto(out, source)
