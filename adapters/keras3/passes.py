"""`backward_passes_per_step`: gradients are added up on each rank, and reduced and applied every so many passes.

The sums are variables, so that compiled steps keep them. Where state is handed through the step (JAX) they are among
the variables of the optimizer; elsewhere they are not. They are not saved in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from .backends import port
from .settings import Settings


class Passes:
    """The sums of one optimizer, and how many passes they hold."""

    def __init__(self, settings: Settings, reducer: Callable[[Sequence[Any], Sequence[Any]], list[Any]]) -> None:
        self._settings, self._reducer = settings, reducer
        self._sums: list[Any] = []
        self._count: Any = None
        self._place_of: dict[Any, int] = {}
        self._seen: set[int] = set()  # places that have had a gradient

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make the sums, once."""
        if self._count is not None:
            return
        self._sums = [keras.Variable(ops.zeros(v.shape, v.dtype), dtype=v.dtype, trainable=False) for v in variables]
        self._count = keras.Variable(0, dtype="int32", trainable=False)
        self._place_of = {optimizer._var_key(variable): i for i, variable in enumerate(variables)}
        if port.FUNCTIONAL:
            for one in [*self._sums, self._count]:
                optimizer._track_variable(one)

    def apply(
        self, optimizer: Any, plain: Callable[..., Any], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> None:
        """Add gradients up; every so many times, apply what they come to.

        Args:
            plain: `apply` of the plain optimizer.
        """
        places = [self._place_of[optimizer._var_key(variable)] for variable in variables]
        sums = [self._sums[place] for place in places]
        totals = [
            None if g is None else s + ops.cast(port.dense(g, self._settings), s.dtype)
            for g, s in zip(gradients, sums, strict=True)
        ]
        self._seen.update(place for place, total in zip(places, totals, strict=True) if total is not None)
        totals = [
            ops.convert_to_tensor(s) if total is None and place in self._seen else total
            for place, total, s in zip(places, totals, sums, strict=True)
        ]

        def last() -> None:
            plain(self._reducer(self._scaled(totals), variables), list(variables))
            for one in sums:
                one.assign(ops.zeros(one.shape, one.dtype))
            self._count.assign(ops.zeros((), self._count.dtype))

        def another() -> None:
            for one, total in zip(sums, totals, strict=True):
                if total is not None:
                    one.assign(total)
            self._count.assign(self._count + 1)
            _innermost(optimizer)._iterations.assign_add(1)

        due = ops.equal(self._count + 1, self._settings.passes)
        if port.FUNCTIONAL:  # a branch of JAX may not assign
            (last if bool(due) else another)()
        else:
            ops.cond(due, last, another)

    def stateless_apply(
        self,
        optimizer: Any,
        plain: Callable[..., Any],
        own: Sequence[Any],
        gradients: Sequence[Any],
        values: Sequence[Any],
    ) -> Any:
        """Like `apply`, on the values of variables; return the new ones."""
        place_of = {id(variable): i for i, variable in enumerate(optimizer.variables)}
        places = [place_of[id(one)] for one in self._sums]
        at_count, at_iterations = place_of[id(self._count)], place_of[id(_innermost(optimizer)._iterations)]
        totals = [
            None if g is None else own[place] + ops.cast(g, own[place].dtype)
            for g, place in zip(gradients, places, strict=True)
        ]

        def last() -> Any:
            reduced = self._reducer(self._scaled(totals), optimizer._trainable_variables)
            new_values, new_own = plain(list(own), reduced, list(values))
            new_own = list(new_own)
            for place in [*places, at_count]:
                new_own[place] = ops.zeros_like(own[place])
            return list(new_values), new_own

        def another() -> Any:
            new_own = list(own)
            for place, total in zip(places, totals, strict=True):
                if total is not None:
                    new_own[place] = total
            for place in (at_count, at_iterations):
                new_own[place] = own[place] + ops.ones_like(own[place])
            return list(values), new_own

        return ops.cond(ops.equal(own[at_count] + 1, self._settings.passes), last, another)

    @property
    def variables(self) -> list[Any]:
        """The sums and their count."""
        return [] if self._count is None else [*self._sums, self._count]

    def holds(self, variable: Any) -> bool:
        """Return whether `variable` is one of the sums, or their count."""
        return variable is self._count or any(variable is one for one in self._sums)

    def _scaled(self, totals: Sequence[Any]) -> list[Any]:
        if not self._settings.average_passes:
            return list(totals)
        return [None if total is None else total / self._settings.passes for total in totals]


def _innermost(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)
