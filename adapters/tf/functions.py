"""Variables and Python objects of one rank, on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet, global_process_set

from .autograph import plain_python
from .crossing import run
from .errors import as_tensorflows
from .local import names_of
from .naming import name_in_graph
from .ops import start_broadcasts
from .tensors import as_tensor


@plain_python
def broadcast_variables(
    variables: Any, root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Set variables to those of rank `root_rank`. Collective.

    Args:
        variables: of TensorFlow or of Keras, in the same order, of the same shapes and dtypes on all ranks.
        root_rank: a global rank.
        inplace: accepted; it changes nothing.

    Returns:
        None; while a graph is built, the operation that does it (`tf.function` runs it in any case).
    """
    listed = list(variables)
    if not listed:
        warnings.warn("broadcast_variables: there are none. Is the model not built yet?", stacklevel=2)
        return None if tf.executing_eagerly() else tf.no_op()
    received = _broadcast_all(listed, root_rank, process_set)
    assigned = [variable.assign(value) for variable, value in zip(listed, received, strict=True)]
    if tf.executing_eagerly():
        return None
    return tf.group(*[one for one in assigned if one is not None])


@plain_python
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """Like `broadcast_variables`; returns the new values."""
    listed = list(variables)
    received = _broadcast_all(listed, root_rank, process_set, name)
    for variable, value in zip(listed, received, strict=True):
        variable.assign(value)
    return received


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank` on all ranks. Collective. It is pickled; `session` is ignored."""
    del session
    with as_tensorflows():
        return hvdlite.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that does what `broadcast_object` does, with these arguments."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks of the set, in rank order. Collective. They are pickled; `session` is ignored."""
    del session
    with as_tensorflows():
        return hvdlite.allgather_object(obj, name, process_set)


def _broadcast_all(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet, name: str | None = None
) -> list[tf.Tensor]:
    base = name or "broadcast_variables"
    if not tf.executing_eagerly():
        base = name_in_graph(base)
    names = [f"{base}.{one}" for one in names_of(variables)]
    values = [as_tensor(variable) for variable in variables]
    return run(
        lambda arrays: start_broadcasts(arrays, root_rank, names, process_set),
        values, [value.dtype for value in values], [value.shape for value in values], base,
    )  # fmt: skip
