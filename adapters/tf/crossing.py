"""How an operation of hvdlite stands in a graph: a node that starts it, and a node that waits for it.

Starting never blocks and TensorFlow runs such nodes in program order, so a rank that waits has started all that
comes before. Some rank has come least far; what it waits for has been started everywhere. So no order in which the
executor picks nodes leads to a deadlock, with one thread either. Waiting nodes have no order among themselves:
several operations of a function are under way at once, and beside the computation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.ops import control_flow_util

from hvdlite import InvalidRequestError

from .errors import as_tensorflows
from .tensors import as_array, as_tensor, to_tensor

Array = NDArray[Any]

# Of one node. An iteration of tf.while_loop may start before the last one's result is fetched (10 at once by
# default), and a result that nobody uses is never fetched.
_MOST_UNFETCHED = 64


class Started(Protocol):
    """Operations under way."""

    def poll(self) -> bool: ...

    def alert(self) -> None: ...

    def wait(self) -> Any:
        """Return the list of results, or raise."""


Begin = Callable[[Sequence[Array]], Started]


class _Crossing:
    """The nodes of one operation."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._tickets = itertools.count(1)
        self._started: dict[int, Started] = {}
        self._last: Started | None = None

    def start(self, *arrays: Array) -> Any:
        last = self._last
        if last is not None and not last.poll():  # another iteration of a loop: the name is taken until then
            _settle(last)
        ticket = next(self._tickets)
        self._last = self._started[ticket] = self._begin(arrays)
        self._last.alert()
        if len(self._started) > _MOST_UNFETCHED:
            del self._started[next(iter(self._started))]
        return np.int64(ticket)

    def finish(self, *tickets: Any) -> Any:
        return self._started.pop(int(tickets[0])).wait()


def run(
    begin: Begin, tensors: Sequence[Any], dtypes: Sequence[tf.DType], shapes: Sequence[Any], name: str
) -> list[tf.Tensor]:
    """Run one operation now, or put it into the graph that is being built.

    Args:
        begin: gets the arrays of `tensors`, which it must not write, and starts the operation. Its results are
            arrays from `memory.pool`.
        dtypes, shapes: of the results, for the graph.
        name: of the nodes.
    """
    if tf.executing_eagerly():
        with as_tensorflows():
            return [to_tensor(array) for array in begin([as_array(as_tensor(t)) for t in tensors]).wait()]
    refuse_xla(name)
    crossing = _Crossing(begin)
    node = tf.compat.v1.get_default_graph().unique_name(_node_name(name), mark_as_used=False)
    ticket = tf.numpy_function(crossing.start, list(tensors), tf.int64, name=f"{node}_start")
    results = tf.numpy_function(crossing.finish, [ticket], list(dtypes), stateful=False, name=node)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def refuse_xla(what: str) -> None:
    """Raise if the graph that is being built will be compiled by XLA, which cannot call Python."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise InvalidRequestError(
            f"{what}: XLA cannot call Python, so nothing is communicated inside a function with jit_compile=True. Set "
            "jit_compile=False in model.compile() or in the tf.function of the step. What it calls for the forward and "
            "backward pass may stay compiled."
        )


def _settle(started: Started) -> None:
    """Wait; an error belongs to whoever fetches the result."""
    try:
        started.wait()
    except Exception:
        return


def _node_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_." else "_" for c in f"hvdlite_{name}")
