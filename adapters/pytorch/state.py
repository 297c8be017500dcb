"""The same start on every rank: parameters, buffers and the optimizer's state, from one of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch

from hvdlite import (
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    ProcessSet,
    broadcast_object,
    global_process_set,
    is_initialized,
    rank,
)
from hvdlite.lowlevel import GroupHandle, Handle, Kind, name_for, refusing

from .agreement import everyones_unless_equal
from .ops import start_broadcast
from .tensors import to_same


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors with those of rank `root_rank`. Collective; the names must be the same on all ranks.

    Call it before the first step, and after rank 0 alone has loaded a checkpoint.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or any other mapping, iterable of
            (name, tensor) pairs, or iterable of tensors. What is not a tensor is left as it is, with a warning.
        root_rank: whose values all get; a global rank, of `process_set`.
        process_set: the ranks that call this.

    Raises:
        MismatchError: ranks have different names, shapes or dtypes.
        InvalidRequestError: `params` is something else, or `root_rank` is not in the set.
    """
    if not is_initialized():
        raise NotInitializedError("broadcast_parameters")
    check = "broadcast_parameters.names"
    with refusing(Kind.ALLGATHER, [check], process_set):
        named = _named_tensors(params)
    _check_equal(check, "names of parameters", sorted(named), process_set)
    _broadcast_tensors(named, root_rank, "broadcast_parameters", process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give `optimizer` the state and the options of the one on rank `root_rank`. Collective.

    Call it where `broadcast_parameters` is called. Nothing is stepped and no gradient is touched. State that only
    the root has is created, state that the root does not have is dropped, and values keep their types. Wrapped
    optimizers may be given as well.

    Args:
        root_rank: whose state all get; a global rank, of `process_set`.
        model: accepted for Horovod's sake.
        process_set: the ranks that call this.

    Raises:
        MismatchError: the optimizers have different numbers of parameters.
    """
    name = name_for("broadcast_optimizer_state", None, process_set)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    _check_equal(f"{name}.groups", "number of parameters in each group", sizes, process_set)
    outline = broadcast_object(_outline(optimizer), root_rank, f"{name}.outline", process_set)
    if rank() != root_rank:
        _take_over(optimizer, outline)
    _broadcast_tensors(_state_tensors(optimizer), root_rank, name, process_set)


class _Blank(NamedTuple):
    """Stands for a tensor of the state, which travels by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Outline(NamedTuple):
    """An optimizer without its tensors.

    Attributes:
        options: of each group, without `params`.
        state: by the parameter's number, or by the key itself where that is not a parameter.
    """

    options: list[dict[str, Any]]
    state: list[tuple[Any, dict[str, Any]]]


def _outline(optimizer: torch.optim.Optimizer) -> _Outline:
    number = {p: i for i, p in enumerate(_parameters(optimizer))}
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = []
    for key, entry in optimizer.state.items():
        blanks = {k: _Blank(tuple(v.shape), v.dtype) if _travels(v) else v for k, v in entry.items()}
        state.append((number.get(key, key) if isinstance(key, torch.Tensor) else key, blanks))
    return _Outline(options, state)


def _take_over(optimizer: torch.optim.Optimizer, outline: _Outline) -> None:
    """Give the optimizer the outline's options, and its state with tensors whose values are still to come."""
    for group, options in zip(optimizer.param_groups, outline.options, strict=True):
        for option, value in options.items():
            _put(group, option, value)
    parameters, state = _parameters(optimizer), cast(dict[Any, dict[str, Any]], optimizer.state)
    wanted = {parameters[key] if isinstance(key, int) else key: entry for key, entry in outline.state}
    for key in [key for key in state if key not in wanted]:
        del state[key]
    for key, entry in wanted.items():
        mine = state[key]
        for name in [name for name in mine if name not in entry]:
            del mine[name]
        for name, value in entry.items():
            _put(mine, name, _filled(value, mine.get(name)))


def _put(mapping: dict[Any, Any], key: Any, value: Any) -> None:
    """Set a value; a tensor that others may hold (a learning rate) keeps its place."""
    old = mapping.get(key)
    if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and old.shape == value.shape:
        if old is not value:
            with torch.no_grad():
                old.copy_(value)
    else:
        mapping[key] = value


def _filled(value: Any, old: Any) -> Any:
    if not isinstance(value, _Blank):
        return value
    if _travels(old) and old.shape == value.shape and old.dtype == value.dtype:
        return old
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")


def _travels(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    number = {p: i for i, p in enumerate(_parameters(optimizer))}
    return {
        f"{number[key] if isinstance(key, torch.Tensor) else key}.{name}": value
        for key, entry in optimizer.state.items()
        for name, value in entry.items()
        if _travels(value)
    }


def _named_tensors(params: Any) -> dict[str, torch.Tensor]:
    if isinstance(params, torch.nn.Module):  # some of them are iterable
        raise InvalidRequestError(f"broadcast_parameters: got the {type(params).__name__}; pass model.state_dict().")
    if isinstance(params, torch.Tensor) or not isinstance(params, Mapping | Iterable):
        raise InvalidRequestError(
            f"broadcast_parameters: expected a state_dict, (name, tensor) pairs or tensors, "
            f"got {type(params).__name__}."
        )
    if isinstance(params, Mapping):
        pairs = [(str(name), value) for name, value in params.items()]
    else:
        pairs = [_pair(i, entry) for i, entry in enumerate(params)]
    named = {name: value for name, value in pairs if isinstance(value, torch.Tensor)}
    left = {name: type(value).__name__ for name, value in pairs if not isinstance(value, torch.Tensor)}
    for name in [name for name, kind in left.items() if kind != "NoneType"]:
        logging.getLogger("hvdlite").warning(
            "broadcast_parameters: %r is a %s, not a tensor, and stays as it is on each rank; use broadcast_object().",
            name, left[name],
        )  # fmt: skip
    if len(named) + len(left) != len(pairs):
        raise InvalidRequestError("broadcast_parameters: two tensors have one name.")
    return named


def _pair(i: int, entry: Any) -> tuple[str, Any]:
    if isinstance(entry, torch.Tensor):
        return f"{i:06d}", entry
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
        return entry
    raise InvalidRequestError(
        f"broadcast_parameters: entry {i} is a {type(entry).__name__}; expected a tensor or a (name, tensor) pair."
    )


def _check_equal(name: str, what: str, value: list[Any], process_set: ProcessSet) -> None:
    """Raise `MismatchError` on all ranks unless `value` is equal on all. Collective; travels as `name`.

    Else ranks would wait for tensors that others do not have.
    """
    everyone = everyones_unless_equal(value, name, process_set)
    if everyone is None:
        return
    by_value: dict[str, list[int]] = {}
    for member, other in everyone.items():
        by_value.setdefault(_difference(other, value), []).append(member)
    raise MismatchError(name, what, by_value, "Make the same model and optimizer on every rank first.")


def _difference(other: list[Any], mine: list[Any]) -> str:
    """Return how `other` looks, in short."""
    extra = [entry for entry in other if entry not in mine][:3]
    lacking = [entry for entry in mine if entry not in other][:3]
    parts = [f"{len(other)} entries", f"with {extra}" if extra else "", f"without {lacking}" if lacking else ""]
    return " ".join(part for part in parts if part)


def _broadcast_tensors(named: Mapping[str, torch.Tensor], root_rank: int, base: str, process_set: ProcessSet) -> None:
    """Broadcast all at once, in place, and wait for all."""
    handles: list[Handle] = []
    first_error: Exception | None = None
    for name in sorted(named):
        try:
            handles.append(start_broadcast(named[name], root_rank, f"{base}.{name}", process_set, to_same))
        except InvalidRequestError as error:  # the others have been told; they wait for the rest
            first_error = first_error or error
    try:
        GroupHandle(handles).wait()
    except Exception as error:
        first_error = first_error or error
    if first_error is not None:
        raise first_error
