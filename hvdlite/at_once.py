"""Where callers enter the shorter ways of an allreduce of which the ranks have learned that it comes.

One that they wait for is run at once, if it is all that comes next (`engine.short_way`); another one is taken in
without checks. Everything that is not plain goes the general way, which knows all cases and says what is wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite import runtime
from hvdlite.buffers import Buffer
from hvdlite.comm.arena import Home
from hvdlite.dtypes import ReduceOp, find_name
from hvdlite.engine.engine import Engine
from hvdlite.engine.handle import Handle
from hvdlite.engine.inbox import Submission
from hvdlite.messages import Kind, Request
from hvdlite.process_set import ProcessSet

Array = NDArray[Any]

_OPS: dict[Any, ReduceOp] = {None: ReduceOp.AVERAGE, **{int(op): op for op in ReduceOp}}


def allreduce_at_once(
    name: str, dtype: str, source: Array, target: Array, op: Any, prescale: Any, postscale: Any, process_set: Any
) -> bool:
    """Allreduce one tensor on the caller's thread, if that is what the ranks have learned to do next. Collective.

    What `name` to `process_set` are need not be checked before: only what all ranks have agreed on is done.

    Args:
        dtype: name, as `dtypes.SUPPORTED` has it.
        source, target: C-contiguous, native-endian, of one shape and that dtype; may be the same.
        op, prescale, postscale, process_set: as the caller gave them; no `op` means the average.

    Returns:
        True: `target` has the result. False: nothing has been done; go the general way.

    Raises:
        HorovodInternalError: the ranks differ, or one could not take part.
    """
    learned = _learned(name, dtype, source, target, op, prescale, postscale, process_set)
    if learned is None:
        return False
    engine, request, home = learned
    flat = source.reshape(-1)
    done = engine.allreduce_at_once(request, flat, flat if target is source else target.reshape(-1), home)
    if isinstance(done, bool):
        return done
    done.wait()
    return True


def allreduce_again(
    name: str,
    dtype: str,
    source: Array,
    target: Array,
    op: Any,
    prescale: Any,
    postscale: Any,
    process_set: Any,
    value: Any,
) -> Handle | None:
    """Submit an allreduce that is part of what the ranks have learned, and return at once. Collective.

    Args: as of `allreduce_at_once`, and:
        value: the result of the handle.

    Returns:
        A handle, as of `start`. None: nothing has been done; go the general way.
    """
    learned = _learned(name, dtype, source, target, op, prescale, postscale, process_set)
    if learned is None:
        return None
    engine, request, home = learned
    handle = Handle(name, None, engine)
    read = Buffer.of(source)
    written = read if target is source else Buffer.of(target)
    submission = Submission(request, handle, read, written, None, value, home=home)
    return handle if engine.submit_repeated(submission) else None


def _learned(
    name: str, dtype: str, source: Array, target: Array, op: Any, prescale: Any, postscale: Any, process_set: Any
) -> tuple[Engine, Request, Home | None] | None:
    """Return who serves the set, what it is asked for, and where that lives; None where it follows no schedule."""
    known = _OPS.get(op) if op is None or type(op) in (int, ReduceOp) else None
    if known is None or type(prescale) is not float or type(postscale) is not float:
        return None
    if type(process_set) is not ProcessSet:
        return None
    engine = runtime.current("allreduce").find_engine(process_set.process_set_id)
    if engine is None or not engine.is_scheduled:
        return None
    home = engine.homes.find(source, engine.group) if engine.homes and target is source else None
    place = home[:2] if home else ()
    request = Request(Kind.ALLREDUCE, name, dtype, source.shape, known, -1, prescale, postscale, home=place)
    return engine, request, home


def reduce_array_at_once(
    tensor: Any, name: str, op: Any, prescale: Any, postscale: Any, process_set: Any, in_place: bool
) -> Array | None:
    """Return the allreduced array, or None where this way does not lead there: then nothing has been done."""
    if type(tensor) is not np.ndarray or not tensor.flags.c_contiguous or (in_place and not tensor.flags.writeable):
        return None
    dtype = find_name(tensor.dtype)
    if dtype is None:
        return None
    output = tensor if in_place else np.empty(tensor.shape, tensor.dtype)
    done = allreduce_at_once(name, dtype, tensor, output, op, prescale, postscale, process_set)
    return output if done else None
