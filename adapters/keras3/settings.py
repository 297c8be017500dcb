"""What the arguments of a distributed optimizer mean, whatever the backend of Keras."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite import InvalidRequestError, ProcessSet
from hvdlite.lowlevel import ReduceOp, check_process_set, resolve_op

_NUMBER = re.compile(r"_\d+$")


class Settings(NamedTuple):
    """How the gradients of an optimizer are reduced.

    Attributes:
        name: of the exchange, if not the usual one.
        groups: lists of variables that are reduced together, into how many such lists to cut them, or None.
        scale_local: gradients of local variables are divided by the number of ranks, as an average's are.
        passes: so many gradients are added up on each rank before they are reduced and applied.
        average_passes: the sum of these is divided by their number.
    """

    op: ReduceOp
    predivide: float
    compression: Any
    sparse_as_dense: bool
    groups: Any
    process_set: ProcessSet
    scale_local: bool
    passes: int
    average_passes: bool
    name: str | None
    device_dense: str
    device_sparse: str


def settings_of(
    op: int,
    predivide: float,
    compression: Any,
    sparse_as_dense: bool,
    num_groups: int,
    groups: Any,
    process_set: ProcessSet,
    scale_local: bool,
    passes: int,
    average_passes: bool,
    name: str | None,
    device_dense: str,
    device_sparse: str,
) -> Settings:
    """Return the settings.

    Raises:
        InvalidRequestError: the arguments cannot be right.
    """
    resolved = resolve_op(op, None)
    if resolved not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidRequestError(f"DistributedOptimizer: op={resolved.name.title()}: expected Average or Sum.")
    if predivide != 1.0 and resolved is not ReduceOp.AVERAGE:
        raise InvalidRequestError(
            f"gradient_predivide_factor={predivide} with op={resolved.name.title()}: only an average is divided."
        )
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise InvalidRequestError(f"backward_passes_per_step={passes!r}: expected a number of at least 1.")
    if not all(callable(getattr(compression, one, None)) for one in ("compress", "decompress")):
        raise InvalidRequestError(f"compression={compression!r}: expected a Compressor, such as hvd.Compression.none.")
    check_process_set(process_set)
    groups = num_groups if groups is None and num_groups else groups
    _check_groups(groups)
    return Settings(
        resolved, predivide, compression, sparse_as_dense, groups, process_set, scale_local, passes, average_passes,
        name, device_dense, device_sparse,
    )  # fmt: skip


def factors_of(settings: Settings) -> dict[str, Any]:
    """Return the arguments of `allreduce` that say what is computed."""
    return {
        "op": settings.op,
        "prescale_factor": 1.0 / settings.predivide,
        "postscale_factor": settings.predivide,
        "process_set": settings.process_set,
    }


def n_ranks(process_set: ProcessSet) -> int:
    """Return the number of ranks that reduce."""
    size = process_set.size()
    if size is None:
        raise InvalidRequestError(f"{process_set} is not registered; see hvd.add_process_set().")
    return size


def takes_part(process_set: ProcessSet) -> bool:
    """Return whether there is anything to do on this rank."""
    return n_ranks(process_set) > 1 and bool(process_set.included())


def bundles_of(places: Sequence[int], groups: Any, variables: Sequence[Any]) -> list[list[int]]:
    """Return which of `places` are reduced together, in an order that is the same on all ranks.

    Args:
        groups: as in `Settings`; variables that are not in `variables` are left out.
    """
    if groups is None:
        return [[place] for place in places]
    if isinstance(groups, int):
        return [part.tolist() for part in np.array_split(np.asarray(places), min(groups, len(places))) if part.size]
    members = [id(variable) for group in groups for variable in group]
    if len(set(members)) != len(members):
        raise InvalidRequestError("groups: a variable is in more than one place; each may be in one group only.")
    place_of = {id(variables[place]): place for place in places}
    lists = [[place_of[id(v)] for v in group if id(v) in place_of] for group in groups]
    named = {place for group in lists for place in group}
    return [group for group in lists if group] + [[place] for place in places if place not in named]


def name_at(place: int, variable: Any) -> str:
    """Return the name of a gradient: by place, so that it does not matter how variables are numbered on a rank."""
    return f"{place}.{_NUMBER.sub('', str(variable.name).rpartition('/')[2])}"


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise InvalidRequestError(f"groups={groups!r:.80}: expected a positive number or a list of lists of variables.")
