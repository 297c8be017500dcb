"""Numbers of the ranks, as one for all: losses and accuracies at the end of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from hvdlite import (
    InvalidRequestError,
    MismatchError,
    ProcessSet,
    RemoteError,
    allgather_object,
    global_process_set,
    rank,
)
from hvdlite.lowlevel import name_for

_ALONE = ""  # the key of a value that is not in a dict


def metric_average(
    value: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    weight: float | None = None,
) -> Any:
    """Return the mean of the ranks' numbers: the same bits on all ranks. Collective; one operation for a whole dict.

    Args:
        value: a number, a tensor without dimensions on any device, or a dict of these with the same keys on all ranks.
        weight: how many samples `value` of this rank is the mean of. Then the mean is one over samples, not over ranks,
            and ranks with weight 0 count for nothing. Give it on all ranks or on none.

    Returns:
        A float; for a tensor a tensor of its dtype (integers: the default dtype) and device; for a dict a dict. Without
        any sample: nan.

    Raises:
        InvalidRequestError: an argument is wrong here. The other ranks raise `RemoteError`.
        MismatchError: keys differ between ranks, or only some give a weight.
    """
    base = name_for("metric_average", name, process_set)
    problem: InvalidRequestError | None = None
    mine: tuple[float | None, dict[Any, float]] | None = None
    try:
        mine = _checked_weight(weight), _as_floats(value)
    except Exception as error:  # any: the other ranks wait
        problem = InvalidRequestError(f"metric_average {base!r}: {str(error) or repr(error)}")
        problem.__cause__ = error
    everyone = allgather_object((rank(), str(problem or ""), mine), base, process_set)
    if problem is not None:
        raise problem
    problems = {who: text for who, text, _ in everyone if text}
    if problems:
        raise RemoteError(base, problems)
    _check_alike(base, {who: theirs for who, _, theirs in everyone})
    means = _means([theirs for _, _, theirs in everyone])
    if isinstance(value, Mapping):
        return {key: _like(one, means[key]) for key, one in value.items()}
    return _like(value, means[_ALONE])


def _as_floats(value: Any) -> dict[Any, float]:
    named = value if isinstance(value, Mapping) else {_ALONE: value}
    for key, one in named.items():
        if isinstance(one, torch.Tensor) and one.ndim == 0 and not one.is_complex():
            continue
        if not isinstance(one, Real):
            of = f" of {key!r}" if isinstance(value, Mapping) else ""
            raise InvalidRequestError(
                "expected a number, a tensor without dimensions or a dict of these, got "
                f"{type(one).__name__}{of}: {one!r:.80}"
            )
    return {key: _as_float(one, f"{key!r}: " if key != _ALONE else "") for key, one in named.items()}


def _as_float(one: Any, where: str) -> float:
    try:
        return float(one.detach() if isinstance(one, torch.Tensor) else one)
    except (OverflowError, ValueError, TypeError, RuntimeError) as error:
        raise InvalidRequestError(f"{where}{one!r:.80} cannot become a float: {error}") from error


def _checked_weight(weight: Any) -> float | None:
    if weight is None:
        return None
    number = _as_float(weight, "weight=") if isinstance(weight, Real) else -1.0
    if not 0 <= number < float("inf"):
        raise InvalidRequestError(f"weight={weight!r}: expected a number of samples.")
    return number


def _check_alike(base: str, everyone: Mapping[int, tuple[float | None, dict[Any, float]]]) -> None:
    keys: dict[str, list[int]] = {}
    weighted: dict[str, list[int]] = {}
    for who, (weight, values) in everyone.items():
        keys.setdefault(f"[{', '.join(sorted(map(repr, values)))}]", []).append(who)
        weighted.setdefault("none" if weight is None else "a number", []).append(who)
    for what, by_value in (("keys", keys), ("weight", weighted)):
        if len(by_value) > 1:
            raise MismatchError(base, what, by_value, "Give the same keys, and a weight or none, on every rank.")


def _means(everyone: list[tuple[float | None, dict[Any, float]]]) -> dict[Any, float]:
    counted = [(1.0 if weight is None else weight, values) for weight, values in everyone if weight != 0]
    total = sum(weight for weight, _ in counted)
    keys = everyone[0][1]
    return {key: sum(w * values[key] for w, values in counted) / total if total else float("nan") for key in keys}


def _like(one: Any, mean: float) -> Any:
    if not isinstance(one, torch.Tensor):
        return mean
    dtype = one.dtype if one.is_floating_point() else torch.get_default_dtype()
    return torch.tensor(mean, dtype=dtype, device=one.device)
