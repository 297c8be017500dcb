"""What the arguments of tapes and optimizers mean, and the reduction of their gradients: some reduced, some local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite import InvalidRequestError, ProcessSet
from hvdlite.lowlevel import ReduceOp, check_process_set, resolve_op

from .exchange import How, check_groups, exchange
from .local import VariableSet, names_of, places_of
from .ops import Reduction


def resolve(op: int, predivide: float, num_groups: int, groups: Any, process_set: ProcessSet, **more: Any) -> How:
    """Return what the arguments of a tape or an optimizer mean together."""
    resolved = resolve_op(op, None)
    if predivide != 1.0 and resolved is not ReduceOp.AVERAGE:
        raise InvalidRequestError(
            f"gradient_predivide_factor={predivide} with op={resolved.name.title()}: only an average is divided."
        )
    check_process_set(process_set)
    groups = num_groups if groups is None and num_groups else groups
    check_groups(groups)
    return How(Reduction(resolved, 1.0 / predivide, predivide, process_set), groups=groups, **more)


def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    how: How,
    base: str,
    local: VariableSet,
    scale: Callable[[Any], Any],
    generic: bool = False,
) -> list[Any]:
    """Reduce the gradients of variables that are not local; the others are scaled. Nothing to do on one rank.

    Args:
        base, how: as of `exchange`, with groups of variables in `how.groups`.
    """
    names = names_of(variables, generic)
    if how.sparse_as_dense:  # on one rank as on many
        gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    results = [scale(g) if v in local else g for g, v in zip(gradients, variables, strict=True)]
    shared = [i for i, v in enumerate(variables) if v not in local]
    if size_of(how) > 1 and shared and how.reduction.process_set.included():
        groups = places_of(how.groups, [variables[i] for i in shared])
        reduced = exchange(
            [gradients[i] for i in shared], [names[i] for i in shared], base, how._replace(groups=groups)
        )
        for i, one in zip(shared, reduced, strict=True):
            results[i] = one
    return results


def size_of(how: How) -> int:
    """Return the number of ranks that reduce."""
    size = how.reduction.process_set.size()
    if size is None:
        raise InvalidRequestError(f"{how.reduction.process_set} is not registered; see hvd.add_process_set().")
    return size
