"""The operations on single values: whatever the backend makes a tensor of goes in, its tensors come out.

All are collective over their process set. They are for values that are there, such as metrics, not for steps that are
being compiled.
"""

from __future__ import annotations

from typing import Any, NoReturn

from hvdlite import Average, InvalidRequestError, ProcessSet, global_process_set
from hvdlite.lowlevel import resolve_op

from .backends import port


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = port.Compression.none,
) -> Any:
    """Return `value` reduced over all ranks.

    Args:
        average: deprecated; use `op`.
        op: Average, which is the default, Sum, or another reduction.
    """
    resolved = resolve_op(op, average)
    return port.compressed(
        value, compression, lambda tensor: port.allreduce(tensor, name, resolved, prescale_factor, postscale_factor)
    )


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the values of all ranks, one after the other along the first dimension, in rank order."""
    return port.allgather(value, name, process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the value of rank `root_rank`."""
    return port.broadcast(value, root_rank, name, process_set)


def reducescatter(
    value: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Return this rank's part, along the first dimension, of `value` reduced over all ranks."""
    return port.reducescatter(value, name, op, process_set)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise: there are no global variables."""
    raise InvalidRequestError(
        f"broadcast_global_variables({root_rank!r}): Keras 3 keeps no list of all variables. Give model.fit() the "
        "callback hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank), or in a loop of your own call "
        "hvd.broadcast_model(model, root_rank)."
    )
