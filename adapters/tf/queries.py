"""What a graph asks when it runs, so that it need not be traced again for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import NotInitializedError
from hvdlite.lowlevel import HorovodBasics

from .autograph import plain_python

NOT_INITIALIZED, UNKNOWN_SET = -1, -3  # what Horovod's operations return instead of raising


@plain_python
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank as an int32 scalar, or -1 where hvdlite does not run. Looked up whenever the graph runs."""
    return _scalar(hvdlite.rank, name or "HorovodRank")


@plain_python
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the local rank, as `rank_op` does."""
    return _scalar(hvdlite.local_rank, name or "HorovodLocalRank")


@plain_python
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host, as `rank_op` does."""
    return _scalar(hvdlite.local_size, name or "HorovodLocalSize")


@plain_python
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a set, as `rank_op` does; -3 if there is no such set."""
    return _scalar(lambda: _of_set(process_set_id, len), name or "HorovodSize")


@plain_python
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 or 0, whether this rank is in a set, as `rank_op` does; -3 if there is no such set."""
    return _scalar(
        lambda: _of_set(process_set_id, lambda ranks: int(hvdlite.rank() in ranks)), name or "HorovodProcessSetIncluded"
    )


def _of_set(process_set_id: int, ask: Callable[[list[int]], int]) -> int:
    ranks = HorovodBasics()._get_process_set_ids_and_ranks().get(process_set_id)
    return UNKNOWN_SET if ranks is None else ask(ranks)


def _scalar(ask: Callable[[], int], name: str) -> tf.Tensor:
    def answer() -> np.int32:
        try:
            return np.int32(ask())
        except NotInitializedError:
            return np.int32(NOT_INITIALIZED)

    if tf.executing_eagerly():
        return tf.constant(answer())
    result = tf.numpy_function(answer, [], tf.int32, name=name)
    result.set_shape([])
    return result
