"""Arrays in memory that all ranks of a host see."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import runtime
from hvdlite.arrays import Array
from hvdlite.dtypes import canonical
from hvdlite.errors import InvalidRequestError
from hvdlite.lowlevel import Kind, name_for, refusing, shared_memory
from hvdlite.process_set import ProcessSet, global_process_set


def shared_zeros(
    shape: int | Sequence[int],
    dtype: Any = "float64",
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Array:
    """Return a new array of zeros which `allreduce_` reduces where it lies, without a copy. Collective.

    An ordinary array of this rank otherwise, and so are views of it; the ranks of the set see its memory, and take
    part in reducing what lies at the same place on all of them. Where ranks are on several hosts, or /dev/shm has no
    room, its memory is private. After `shutdown()` it is like any array.

    Args:
        shape: equal on all ranks.
        dtype: one that hvdlite reduces; of equal size on all ranks.
        process_set: whose operations reduce it in place; in those of others it is copied.
    """
    runtime.current("shared_zeros")
    name = name_for(Kind.SHARED_BUFFER, name, process_set)
    with refusing(Kind.SHARED_BUFFER, [name], process_set):
        kept = canonical(np.dtype(dtype))
        lengths = _lengths_of(shape)
    nbytes = math.prod(lengths) * kept.itemsize
    return shared_memory(max(1, nbytes), process_set, name)[:nbytes].view(kept).reshape(lengths)


def _lengths_of(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        lengths = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0:
        raise InvalidRequestError(f"shape={shape!r}: expected a number of elements, or several, none below zero.")
    return lengths
