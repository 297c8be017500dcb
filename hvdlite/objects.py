"""Python objects between ranks: pickled by cloudpickle, moved as bytes.

Only what another rank of this job sent is unpickled, and only in these two calls.
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np

from hvdlite import api
from hvdlite.arrays import Array
from hvdlite.errors import HorovodInternalError, InvalidRequestError
from hvdlite.lowlevel import name_for
from hvdlite.process_set import ProcessSet, global_process_set

_HEADER = np.dtype("<i8")  # payload bytes; negative where the payload says why there is no object


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank` on all ranks. Collective.

    The root gets its own object back; the others need not pass one.

    Raises:
        InvalidRequestError: on the root, if its object cannot be pickled; the others raise `HorovodInternalError`.
    """
    base = name_for("broadcast_object", name, process_set)
    # What is no set is refused by broadcast(), which tells the others.
    is_root = isinstance(process_set, ProcessSet) and process_set.included() and _is_me(root_rank)
    payload, problem = _pickled(obj) if is_root else (np.empty(0, np.uint8), None)
    length = np.array([-payload.size if problem else payload.size], np.int64)
    length = api.broadcast(length, root_rank, f"{base}.length", process_set)
    if not is_root:
        payload = np.empty(abs(int(length[0])), np.uint8)
    api.broadcast_(payload, root_rank, f"{base}.bytes", process_set)
    if problem is not None:
        raise problem
    if length[0] < 0:
        raise HorovodInternalError(f"broadcast_object {base!r}: rank {root_rank}: {payload.tobytes().decode()}")
    return obj if is_root else pickle.loads(payload.tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks of the set, in rank order. Collective.

    Raises:
        InvalidRequestError: on a rank whose object cannot be pickled; the others raise `HorovodInternalError`.
    """
    base = name_for("allgather_object", name, process_set)
    payload, problem = _pickled(obj)
    header = np.array([-payload.size if problem else payload.size], _HEADER).view(np.uint8)
    everything = api.allgather(np.concatenate([header, payload]), f"{base}.bytes", process_set)
    if problem is not None:
        raise problem
    return _unpack(everything, base, process_set)


def _unpack(everything: Array, base: str, process_set: ProcessSet) -> list[Any]:
    objects: list[Any] = []
    start = 0
    while start < everything.size:
        length = int(everything[start : start + 8].view(_HEADER)[0])
        payload = everything[start + 8 : start + 8 + abs(length)].tobytes()
        if length < 0:
            rank = (process_set.ranks or [])[len(objects)]
            raise HorovodInternalError(f"allgather_object {base!r}: rank {rank}: {payload.decode()}")
        objects.append(pickle.loads(payload))
        start += 8 + abs(length)
    return objects


def _pickled(obj: Any) -> tuple[Array, InvalidRequestError | None]:
    """Return the bytes of `obj`, or of the reason why there are none, and the error to raise."""
    try:
        return np.frombuffer(bytearray(cloudpickle.dumps(obj)), np.uint8), None
    except Exception as error:  # pickling runs the object's own code, which may raise anything
        text = f"{type(obj).__name__} cannot be pickled: {type(error).__name__}: {error}"
        problem = InvalidRequestError(text)
        problem.__cause__ = error
        return np.frombuffer(bytearray(text.encode()), np.uint8), problem


def _is_me(rank: int) -> bool:
    from hvdlite import runtime

    return runtime.current("hvd.broadcast_object()").rank == rank
