"""The narrow door for adapters: start operations on flat host memory.

`hvdlite.torch` and its siblings use this module, `hvdlite` itself, and nothing else
of the core. They turn framework tensors into arrays that share memory with them.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdlite import runtime
from hvdlite.at_once import allreduce_again, allreduce_at_once
from hvdlite.basics import HorovodBasics
from hvdlite.buffers import Buffer, describe
from hvdlite.comm.arena import Home, SharedBuffer
from hvdlite.dtypes import BFLOAT16, ReduceOp, canonical, check_reducible, name_of
from hvdlite.engine.cycle import split_rows
from hvdlite.engine.engine import Engine
from hvdlite.engine.handle import GroupHandle, Handle
from hvdlite.engine.inbox import Allocate, Submission
from hvdlite.errors import HorovodInternalError, InvalidRequestError, describe_ranks
from hvdlite.messages import JOIN_NAME, Kind, Request
from hvdlite.process_set import GLOBAL_ID, ProcessSet, check_process_set

__all__ = [
    "BFLOAT16",
    "JOIN_NAME",
    "GroupHandle",
    "Handle",
    "HorovodBasics",
    "Item",
    "KeptName",
    "Kind",
    "ReduceOp",
    "SharedBuffer",
    "allreduce_again",
    "allreduce_at_once",
    "asynchronous",
    "check_process_set",
    "describe_ranks",
    "fusion_threshold",
    "group_names",
    "name_for",
    "refusing",
    "register_kernel",
    "resolve_op",
    "seconds_busy",
    "shared_buffer",
    "shared_memory",
    "split_rows",
    "start",
    "start_empty",
    "synchronous",
]

Array = NDArray[Any]
_P = ParamSpec("_P")
_Begun = TypeVar("_Begun", Handle, GroupHandle, Handle | GroupHandle)
_WITH_ROWS = frozenset({Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER})
_REDUCING = frozenset({Kind.ALLREDUCE, Kind.REDUCESCATTER})


class Item(NamedTuple):
    """One tensor of an operation.

    Attributes:
        source: the values of this rank, C-contiguous, native-endian, any shape. Must not change until the
            handle is done.
        target: where the result goes (allreduce, broadcast, reducescatter): C-contiguous, may be `source`.
        allocate: makes the target where its shape is known only later (allgather, alltoall): from a
            shape, returns (flat array over the new memory, what `convert` gets for it).
        value: what `convert` gets when `target` is filled.
        convert: makes the handle's result; called once, on the thread that waits.
        home: the shared buffer in which `target` lies (allreduce). Where it lies at the same place on all ranks
            it is reduced there: without a copy where it is `source`, too, else with a copy of what other ranks reduce.
    """

    source: Array
    target: Array | None = None
    allocate: Allocate | None = None
    value: Any = None
    convert: Callable[[Any], Any] | None = None
    home: SharedBuffer | None = None


def name_for(kind: Kind | str, name: str | None, process_set: ProcessSet) -> str:
    """Return `name`, or the next one for an operation without a name."""
    kind = kind.value if isinstance(kind, Kind) else kind
    run = runtime.current(kind)
    if name is not None:
        return name if isinstance(name, str) else str(name)  # scripts number their tensors
    # Under what is no set, the name that the others use in the set of all, so that `refusing` can tell them.
    return run.next_name(kind, process_set.process_set_id if isinstance(process_set, ProcessSet) else GLOBAL_ID)


class KeptName:
    """A name for the operations of one object, the same on all ranks.

    Each `init()` starts to count anew, and other ranks' objects may be new then; so it is asked for again after that,
    and a copy or pickle comes without one.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._name = kind, ""
        self._run: weakref.ref[runtime.Runtime] | None = None

    def get(self, process_set: ProcessSet) -> str:
        """Return the name. The ranks of the set must ask for theirs in the same order."""
        run = runtime.current(self._kind)
        if self._run is None or self._run() is not run:
            self._run, self._name = weakref.ref(run), name_for(self._kind, None, process_set)
        return self._name

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptName, (self._kind,)


def group_names(base: str, n: int) -> list[str]:
    """Return the names of the members of a group: `base_1ofn`, …"""
    return [f"{base}_{i + 1}of{n}" for i in range(n)]


def resolve_op(op: int | None, average: bool | None) -> ReduceOp:
    """Return the operator that Horovod's two parameters mean together."""
    if op is not None and average is not None:
        raise InvalidRequestError(f"op={op!r} and average={average!r} are both given; give one.")
    if average is not None:
        _check_average(average)
        _warn_of_average(average)
    if op is None:
        return ReduceOp.AVERAGE if average is None or average else ReduceOp.SUM
    try:
        return ReduceOp(op)
    except ValueError as error:
        raise InvalidRequestError(
            f"op={op!r}: expected one of {', '.join(o.name.title() for o in ReduceOp)}."
        ) from error


def _check_average(average: object) -> None:
    if not isinstance(average, Real | np.bool_) or average not in (0, 1):
        for_a_name = f"; for a name say name={average!r}" if isinstance(average, str) else ""
        raise InvalidRequestError(f"average={average!r}: expected True or False{for_a_name}.")


def _warn_of_average(average: bool) -> None:
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("hvdlite."):
        level, frame = level + 1, frame.f_back
    instead = "Average" if average else "Sum"
    warnings.warn(f"average={average} is deprecated; use op=hvd.{instead}.", DeprecationWarning, stacklevel=level + 1)


def asynchronous(begin: Callable[_P, _Begun]) -> Callable[_P, _Begun]:
    """Make a public `_async` function of one that submits: the engine's thread works, whatever the caller does next."""

    @functools.wraps(begin)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _Begun:
        handle = begin(*args, **kwargs)
        handle.alert()
        return handle

    return call


def synchronous(start_it: Callable[_P, Handle | GroupHandle], doc: str) -> Callable[_P, Any]:
    """Return the form of an `_async` function that waits, with its parameters: the caller's own thread works."""
    begin: Callable[_P, Handle | GroupHandle] = start_it.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(begin)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        return begin(*args, **kwargs).wait()

    call.__name__ = call.__qualname__ = begin.__name__.replace("_async", "")
    call.__doc__ = doc
    return call


class refusing:
    """Around what may find a fault in this rank's arguments: then the other ranks are told, and raise too.

    An adapter wraps its conversion of tensors; `start` checks the rest by itself.
    """

    __slots__ = ("_engine", "_kind", "_names")

    def __init__(self, kind: Kind, names: Sequence[str], process_set: ProcessSet) -> None:
        self._engine = _engine_of(process_set, kind, names)
        self._kind, self._names = kind, names

    def __enter__(self) -> Engine:
        return self._engine

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):  # any: whatever it is, this rank will not come
            problem = str(error) or repr(error)
            self._engine.poison([Request(self._kind, name, problem=problem) for name in self._names])


def start(
    kind: Kind,
    names: Sequence[str],
    items: Sequence[Item],
    process_set: ProcessSet,
    *,
    op: ReduceOp = ReduceOp.SUM,
    root_rank: int | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: Sequence[int] | None = None,
    grouped: bool = True,
) -> list[Handle]:
    """Submit one operation, or a group that becomes ready as one, and return at once. Collective over the set.

    Then either wait for the handles, or `alert()` the last one, so that the engine works on them meanwhile.

    Args:
        names: one for each of `items`. More than one make a group.
        grouped: False for operations that have nothing to do with each other, which saves wakes of the engine.
        root_rank: global rank (broadcast only).
        splits: rows of the source for each rank of the set (alltoall only); None cuts evenly.

    Raises:
        InvalidRequestError: the arguments are wrong here. All ranks that submit these names raise.
        NotInitializedError, ShutdownError: hvdlite does not run.
        NotMemberError: this rank is not in the set. The members are not disturbed.
    """
    group = _group_identity(names) if grouped and len(names) > 1 else ""
    with refusing(kind, names, process_set) as engine:
        root = _root_within(engine.members, root_rank, names[0]) if kind is Kind.BROADCAST else -1
        factors = (float(prescale), float(postscale))
        submissions = []
        for name, item in zip(names, items, strict=True):
            source = item.source
            dtype = canonical(source.dtype)
            if kind in _REDUCING:
                _check_reduction(kind, name, dtype, op)
            if kind in _WITH_ROWS and source.ndim == 0:
                raise InvalidRequestError(
                    f"{kind.value} of tensor {name!r}: a scalar has no first dimension; reshape it to (1,)."
                )
            rows = _rows_for_each(name, source, splits, len(engine.members)) if kind is Kind.ALLTOALL else ()
            home = None
            if item.target is not None and kind is Kind.ALLREDUCE:
                if item.home is not None:
                    home = item.home.home_of(item.target, engine.group)
                elif engine.homes and item.target is source:
                    home = engine.homes.find(source, engine.group)
            request = Request(
                kind, name, name_of(dtype), source.shape, op, root, *factors, rows, "cpu",
                group, len(names) if group else 0, "", home[:2] if home else (),
            )  # fmt: skip
            submissions.append(_submission(request, item, engine, home))
        engine.submit(submissions)  # a name that is still in flight here may be free on other ranks
    return [submission.handle for submission in submissions]


def start_empty(kind: Kind, name: str, process_set: ProcessSet, convert: Callable[[Any], Any] | None = None) -> Handle:
    """Submit an operation without a tensor: barrier or join."""
    # A join cannot be refused: the others wait for whoever has not joined.
    engine = _engine_of(process_set, kind, [] if kind is Kind.JOIN else [name])
    handle = Handle(name, convert, engine)
    engine.submit([Submission(Request(kind, name), handle)])
    return handle


def shared_buffer(nbytes: int, process_set: ProcessSet, name: str | None = None) -> SharedBuffer | None:
    """Return new memory of `nbytes` bytes on each rank, in which tensors are reduced without a copy. Collective.

    It serves the operations of this process set only, and only until `shutdown()`: after that, and after its
    `close()`, tensors in it are like any others.

    Args:
        nbytes: at least 1, the same on all ranks.
        name: as of a tensor; None counts the calls.

    Returns:
        None, on all ranks alike, where they share no memory, where it has no room left (rank 0 warns
        once), and where there is one rank only.

    Raises:
        MismatchError: the ranks ask for different lengths.
        InvalidRequestError: `nbytes` is not a positive number here. All ranks that ask under this name raise.
    """
    name = name_for(Kind.SHARED_BUFFER, name, process_set)
    with refusing(Kind.SHARED_BUFFER, [name], process_set) as engine:
        if isinstance(nbytes, bool) or not isinstance(nbytes, int | np.integer) or nbytes < 1:
            raise InvalidRequestError(f"shared_buffer({nbytes!r}): expected a positive number of bytes.")
        handle = Handle(name, driver=engine)
        engine.submit([Submission(Request(Kind.SHARED_BUFFER, name, "uint8", (int(nbytes),)), handle)])
    made = handle.wait()
    return None if made is None else SharedBuffer(engine.group, engine.comm.rank, *made)


def shared_memory(nbytes: int, process_set: ProcessSet, name: str | None = None) -> Array:
    """Return zeros, flat uint8: tensors over this array or parts of it are reduced in place. Collective.

    Arguments and errors as of `shared_buffer`; where that is None, the memory is private, and the rest is the same.
    """
    made = shared_buffer(nbytes, process_set, name)
    if made is None:
        return np.zeros(nbytes, np.uint8)
    return _engine_of(process_set, Kind.SHARED_BUFFER, []).homes.keep(made)


def fusion_threshold() -> int:
    """Return HVDLITE_FUSION_THRESHOLD: the largest fused buffer, bytes."""
    return runtime.current("hvdlite.lowlevel.fusion_threshold()").config.fusion_threshold


def seconds_busy(process_set: ProcessSet) -> float:
    """Return for how many seconds operations of the set have run since `init()`, the one that does now included."""
    return _engine_of(process_set, Kind.ALLREDUCE, []).seconds


def register_kernel(
    dtype: np.dtype[Any], op: ReduceOp, fn: Callable[[Sequence[Array], Array, float, float], None]
) -> None:
    """Let a framework's kernel reduce a half type. See `Kernels.register` for what `fn` must do."""
    runtime.current("hvdlite.lowlevel.register_kernel()").register_kernel(dtype, op, fn)


def _engine_of(process_set: ProcessSet, kind: Kind, names: Sequence[str]) -> Engine:
    """Return who serves the set. If it is none at all, the ranks of the set of all hear of it, too."""
    run = runtime.current(kind.value)
    try:
        check_process_set(process_set)
    except InvalidRequestError as error:
        run.engine_of(GLOBAL_ID).poison([Request(kind, name, problem=str(error)) for name in names])
        raise
    return run.engine_of(process_set.process_set_id)


def _submission(request: Request, item: Item, engine: Engine, home: Home | None) -> Submission:
    source = Buffer.of(item.source)
    target = item.target
    return Submission(
        request,
        Handle(request.name, item.convert, engine),
        source,
        None if target is None else source if target is item.source else Buffer.of(target),
        item.allocate,
        item.value,
        home=home,
    )


def _check_reduction(kind: Kind, name: str, dtype: np.dtype[Any], op: ReduceOp) -> None:
    if kind is Kind.REDUCESCATTER and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        # Horovod reports this one as an internal error, and scripts may rely on it.
        raise _UnsupportedReduceError(
            f"reducescatter of tensor {name!r}: op={op.name.title()}: expected Sum or Average."
        )
    try:
        check_reducible(dtype, op)
    except InvalidRequestError as error:
        raise type(error)(f"{kind.value} of tensor {name!r}: {error}") from error


class _UnsupportedReduceError(InvalidRequestError, HorovodInternalError):
    """Both a ValueError, since an argument is wrong, and what Horovod raises."""


def _root_within(members: Sequence[int], root_rank: int | None, name: str) -> int:
    if root_rank not in members:
        raise InvalidRequestError(
            f"broadcast of tensor {name!r}: root_rank={root_rank!r} is not in the process set, whose ranks are "
            f"{list(members)}. Roots are global ranks."
        )
    return members.index(root_rank)


def _rows_for_each(name: str, source: Array, splits: Sequence[int] | None, size: int) -> tuple[int, ...]:
    what = f"alltoall of tensor {name!r}, {describe(source)}, over {size} ranks"
    n_rows = source.shape[0]
    if splits is None or len(splits) == 0:
        if n_rows % size:
            raise InvalidRequestError(f"{what}: {n_rows} rows cannot be cut evenly; give splits.")
        return (n_rows // size,) * size
    rows = tuple(int(n) for n in splits)
    if len(rows) != size:
        raise InvalidRequestError(f"{what}: splits={list(rows)} has {len(rows)} entries; one for each rank is needed.")
    if min(rows) < 0:
        raise InvalidRequestError(f"{what}: splits={list(rows)} has a negative entry.")
    if sum(rows) > n_rows:
        raise InvalidRequestError(
            f"{what}: splits={list(rows)} sum to {sum(rows)}, more than the {n_rows} rows there are."
        )
    return rows


def _group_identity(names: Sequence[str]) -> str:
    """Return a text that is equal on two ranks if, and only if for practice, their groups have the same members.

    Up to the first "#" it is the group's name.
    """
    base = names[0].removesuffix(f"_1of{len(names)}").replace("#", "%")
    return f"{base}#{len(names)}#{zlib.crc32(chr(0).join(names).encode()):08x}"
