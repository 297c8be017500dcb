"""Do all ranks train the same model? Asked once, when an optimizer is wrapped."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvdlite import InvalidRequestError, MismatchError, ProcessSet

from .agreement import everyones_unless_equal
from .tensors import describe

_ABSENT = "absent"
_REMEDY = "Make the same model and optimizer, with the same arguments, on every rank before you wrap it."


def signature_of(name_of: Mapping[torch.Tensor, str], options: Mapping[str, str]) -> dict[str, str]:
    """Return what must be equal on all ranks, in words: the arguments of `DistributedOptimizer`, and each parameter."""
    lazy = [name for parameter, name in name_of.items() if torch.nn.parameter.is_lazy(parameter)]
    if lazy:
        raise InvalidRequestError(
            f"parameter {lazy[0]!r} has no shape yet: let the model see a batch before its optimizer is wrapped."
        )
    described = {name: describe(parameter) for parameter, name in name_of.items()}
    return {**described, **{f"DistributedOptimizer({option}=)": value for option, value in options.items()}}


def check_signature(mine: Mapping[str, str], name: str, process_set: ProcessSet) -> None:
    """Raise on all ranks of the set unless `mine` is equal on all, in the same order. Collective.

    Args:
        name: under which it is asked.

    Raises:
        MismatchError: names the first entry that differs, and what it is on which ranks.
    """
    everyone = everyones_unless_equal(dict(mine), name, process_set)
    if everyone is None:
        return
    for entry in dict.fromkeys(entry for one in everyone.values() for entry in one):
        by_value: dict[str, list[int]] = {}
        for rank, one in everyone.items():
            by_value.setdefault(one.get(entry, _ABSENT), []).append(rank)
        if len(by_value) > 1:
            raise MismatchError(entry, "model signature", by_value, _REMEDY)
    orders: dict[str, list[int]] = {}
    for rank, one in everyone.items():
        orders.setdefault(", ".join(list(one)[:8]), []).append(rank)
    raise MismatchError(next(iter(mine)), "order of parameters", orders, _REMEDY)
