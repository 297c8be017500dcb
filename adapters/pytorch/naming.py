"""Which parameter's gradient travels under which name, and in which group. Checks what the user gave. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import InvalidRequestError

Groups = int | Sequence[Sequence[torch.Tensor]]


def name_parameters(param_groups: Sequence[dict[str, Any]], named_parameters: Any) -> dict[torch.Tensor, str]:
    """Return a name for each parameter of an optimizer, in its order.

    Args:
        named_parameters: (name, parameter) pairs, or None: then by position.
    """
    parameters = [(i, j, p) for i, group in enumerate(param_groups) for j, p in enumerate(group["params"])]
    if named_parameters is None:
        return {p: f"noname.{i}.{j}" for i, j, p in parameters}
    name_of = _by_parameter(named_parameters)
    unnamed = [f"parameter {j} of group {i}" for i, j, p in parameters if p not in name_of]
    if unnamed:
        raise InvalidRequestError(
            f"named_parameters does not name every parameter of the optimizer: {', '.join(unnamed[:5])}"
            f"{f' and {len(unnamed) - 5} more' if len(unnamed) > 5 else ''}. Pass model.named_parameters()."
        )
    return {p: name_of[p] for _, _, p in parameters}


def bundle_parameters(parameters: Sequence[torch.Tensor], groups: Groups | None) -> list[list[torch.Tensor]]:
    """Split parameters into lists that are reduced together.

    Args:
        groups: None for one each; how many lists of equal length; or the lists, where what is not named stays alone.
    """
    if groups is None:
        return [[p] for p in parameters]
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups <= 0:
            raise InvalidRequestError(f"groups={groups}: expected a positive number, or a list of lists of parameters.")
        return _cut(parameters, min(groups, len(parameters)))
    return _as_listed(parameters, groups)


def resolve_groups(num_groups: int, groups: Groups | None) -> Groups | None:
    """Return what Horovod's old and new parameter mean together."""
    return num_groups if groups is None and num_groups else groups


def check_passes(passes: int) -> None:
    """Raise unless `passes` can be a number of backward passes."""
    if not isinstance(passes, int) or passes <= 0:
        raise InvalidRequestError(f"backward_passes_per_step={passes!r}: expected a positive number.")


def _by_parameter(named_parameters: Any) -> dict[torch.Tensor, str]:
    try:
        pairs = [(name, parameter) for name, parameter in named_parameters]
    except (TypeError, ValueError) as error:
        pairs = [(None, error)]
    if not all(isinstance(name, str) and isinstance(p, torch.Tensor) for name, p in pairs):
        raise InvalidRequestError("named_parameters: expected (name, parameter) pairs; see model.named_parameters().")
    twice = [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]
    if twice:
        raise InvalidRequestError(
            f"named_parameters: these names come more than once: {', '.join(sorted(twice))}. "
            "Names must be unique; add a prefix for each of several models."
        )
    return {parameter: name for name, parameter in pairs}


def _cut(parameters: Sequence[torch.Tensor], n: int) -> list[list[torch.Tensor]]:
    each, more = divmod(len(parameters), n) if n else (0, 0)
    lists, start = [], 0
    for i in range(n):
        stop = start + each + (i < more)
        lists.append(list(parameters[start:stop]))
        start = stop
    return lists


def _as_listed(parameters: Sequence[torch.Tensor], groups: Any) -> list[list[torch.Tensor]]:
    if not _is_list(groups) or not all(_is_list(group) for group in groups):
        raise InvalidRequestError(
            f"groups={groups!r:.80}: expected a positive number or a list of lists of parameters."
        )
    members = [p for group in groups for p in group]
    if not all(isinstance(p, torch.Tensor) for p in members):
        raise InvalidRequestError("groups: expected a list of lists of parameters; some members are not tensors.")
    if len(set(members)) != len(members):
        raise InvalidRequestError("groups: a parameter is in more than one place; each may be in one group only.")
    known, named = set(parameters), set(members)
    lists = [[p for p in group if p in known] for group in groups]
    return [one for one in lists if one] + [[p] for p in parameters if p not in named]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
