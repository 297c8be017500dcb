"""`DistributedOptimizer`: an optimizer of Keras that reduces gradients over the ranks before it applies them.

The optimizer that is given goes on as it is, with its state; only its class is replaced, by a subclass of it. What
is saved is the plain optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from hvdlite import Average, InvalidRequestError, ProcessSet, global_process_set

from .backends import port
from .changes import change_keras
from .passes import Passes
from .settings import Settings, settings_of
from .variables import Variables, weights_of


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = port.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make `optimizer` reduce gradients over the ranks of the set, and return it.

    From here on `apply()`, `apply_gradients()` and `stateless_apply()` are collective, and so is each step of
    `model.fit()`. Clipping, weight decay and loss scaling see the reduced gradients. Make it so before the first step:
    one that has been compiled by then stays as it is.

    Args:
        optimizer: any optimizer of Keras.
        name: of the exchange of gradients, in messages and the timeline.
        device_dense, device_sparse: where they are exchanged (TensorFlow only).
        compression: what gradients are turned into to travel.
        sparse_as_dense: IndexedSlices travel as dense tensors (TensorFlow only; elsewhere gradients are dense).
        gradient_predivide_factor: of an average, how much of the division comes before the sum.
        op: Average or Sum.
        groups: lists of variables whose gradients are reduced together, or into how many such lists to cut them.
        backward_passes_per_step: so many gradients are added up here, then their sum is reduced and applied.
        average_aggregated_gradients: the sum of these is divided by their number.
        scale_local_gradients: gradients of local variables are divided by the number of ranks, as an average's are.

    Raises:
        InvalidRequestError: the arguments cannot be right.
    """
    settings = settings_of(
        op, gradient_predivide_factor, compression, sparse_as_dense, num_groups, groups, process_set,
        scale_local_gradients, backward_passes_per_step, average_aggregated_gradients, name, device_dense,
        device_sparse,
    )  # fmt: skip
    return distribute(optimizer, settings)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = port.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Like `DistributedOptimizer`, with the weights of `local_layers` local to each rank.

    Args:
        local_layers: None, a layer of Keras, or a collection of them. They must be built.
    """
    local = weights_of(local_layers)
    made = DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        0, groups, backward_passes_per_step, average_aggregated_gradients, process_set, scale_local_gradients,
    )  # fmt: skip
    for variable in local:
        made.register_local_var(variable)
    return made


class State:
    """What an optimizer has become: how it reduces, and whether it is just doing so."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reducer = port.Reducer(settings)
        self.passes = Passes(settings, self.reduce) if settings.passes > 1 else None
        self.busy = self.saving = self.looks_for_overflows = False

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients. Collective.

        Where the optimizer skips steps with an overflow, one in a gradient that stays on its rank is made one on all
        ranks: were only that rank to lower its loss scale, gradients of different scales would be added up from then.
        """
        local = [i for i, one in enumerate(variables) if gradients[i] is not None and one in self.reducer.local]
        if not (self.looks_for_overflows and local):
            plain: list[Any] = self.reducer(gradients, variables)
            return plain
        gradients, as_dense = list(gradients), self.settings._replace(sparse_as_dense=True)
        for i in local:
            gradients[i] = port.dense(gradients[i], as_dense)
        finite = [ops.all(ops.isfinite(gradients[i])) for i in local]
        mine = ops.where(ops.all(ops.stack(finite)), 0.0, np.inf)
        reduced: list[Any] = self.reducer([*gradients, mine], [*variables, _Overflow])
        anyones = reduced.pop()
        for i in local:
            reduced[i] = reduced[i] + ops.cast(anyones, reduced[i].dtype)
        return reduced

    @contextmanager
    def as_plain(self) -> Iterator[None]:
        """Show only the variables that a plain optimizer has."""
        before, self.saving = self.saving, True
        try:
            yield
        finally:
            self.saving = before

    @contextmanager
    def once(self) -> Iterator[None]:
        """What is called within reduces no more: methods of optimizers call each other, or those of one within."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before


class _Overflow:
    """Stands for a variable, whose gradient says whether there was an overflow."""

    name = "overflow"


class _Distributed:
    """What the class of a distributed optimizer has before that of the given one. Kept apart: `_hvd`."""

    _hvd: State

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce gradients and apply them. Collective."""
        me: Any = self
        state, plain = self._hvd, super().apply  # type: ignore[misc]
        gradients = list(grads)
        if trainable_variables is None and not me.built:
            return plain(grads)  # which says what is wrong
        variables = list(me._trainable_variables if trainable_variables is None else trainable_variables)
        if state.busy or not gradients or len(gradients) != len(variables):
            return plain(grads, trainable_variables)
        if state.passes is None:
            reduced = state.reduce(gradients, variables)
            with state.once():
                return plain(reduced, trainable_variables)
        if not me.built:
            me.build(variables)
        if port.FUNCTIONAL and not all(port.concrete(g) for g in gradients if g is not None):
            return _apply_through_values(me, gradients, variables)
        return state.passes.apply(me, _Within(state, plain), gradients, variables)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Reduce gradients and return the new values of variables. Collective."""
        me: Any = self
        state, plain = self._hvd, super().stateless_apply  # type: ignore[misc]
        if state.busy or not me.built:
            return plain(optimizer_variables, grads, trainable_variables)
        if state.passes is not None:
            within = _Within(state, plain)
            return state.passes.stateless_apply(me, within, optimizer_variables, grads, trainable_variables)
        reduced = state.reduce(list(grads), me._trainable_variables)
        with state.once():
            return plain(optimizer_variables, reduced, trainable_variables)

    def build(self, variables: Any) -> None:
        state = self._hvd
        outermost = not state.busy
        with state.once():
            super().build(variables)  # type: ignore[misc]
        if outermost and state.passes is not None:
            state.passes.build(self, list(variables))

    @property
    def variables(self) -> Variables:
        """The variables of the optimizer; as in Keras 2, the list may be called."""
        found, state = super().variables, self._hvd  # type: ignore[misc]
        if state.saving and state.passes is not None:
            found = [one for one in found if not state.passes.holds(one)]
        return Variables(found)

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        self._hvd.reducer.local.add(var)

    def save_own_variables(self, store: Any) -> None:
        with self._hvd.as_plain():
            super().save_own_variables(store)  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        with self._hvd.as_plain():
            super().load_own_variables(store)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """Copies reduce gradients as well: Keras makes them from a file, which has the plain optimizer."""
        of_keras: Any = super()
        _, (saved,) = of_keras.__reduce__()
        return _copied, (self.__class__, saved, _Kept(self._hvd.settings, list(self._hvd.reducer.local)))


class _Kept(NamedTuple):
    """What a copy shares with the optimizer that it is of: variables and process sets are the same ones."""

    settings: Settings
    local: Sequence[Any]

    def __deepcopy__(self, memo: Any) -> _Kept:
        return self


class _Within:
    """Calls a method of the plain optimizer, which reduces nothing more."""

    def __init__(self, state: State, method: Any) -> None:
        self._state, self._method = state, method

    def __call__(self, *arguments: Any) -> Any:
        with self._state.once():
            return self._method(*arguments)


def distribute(optimizer: Any, settings: Settings) -> Any:
    """Replace the class of `optimizer`, and return it."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidRequestError(
            f"DistributedOptimizer: expected an optimizer of Keras 3, got {type(optimizer).__module__}."
            f"{type(optimizer).__name__}."
        )
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise InvalidRequestError("this optimizer is distributed already; its gradients would be reduced twice.")
    if settings.passes > 1 and _innermost(optimizer).gradient_accumulation_steps:
        raise InvalidRequestError(
            f"backward_passes_per_step={settings.passes} and gradient_accumulation_steps="
            f"{_innermost(optimizer).gradient_accumulation_steps} of the optimizer both add gradients up; give one."
        )
    change_keras()
    share(optimizer, State(settings))
    if settings.passes > 1 and optimizer.built:
        optimizer._hvd.passes.build(optimizer, optimizer._trainable_variables)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Return whether `optimizer` reduces gradients."""
    return issubclass(type(optimizer), _Distributed)


def variables_of(optimizer: Any) -> list[Any]:
    """Return all that an optimizer, or None, keeps from step to step: also the sums of `backward_passes_per_step`."""
    if optimizer is None:
        return []
    passes = optimizer._hvd.passes if is_distributed(optimizer) else None
    return [*optimizer.variables, *(passes.variables if passes is not None else [])]


def share(optimizer: Any, state: State) -> None:
    """Make `optimizer` reduce gradients as `state` says, which may belong to one within it, too."""
    plain = type(optimizer)
    state.looks_for_overflows |= isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    def from_config(cls: type, config: Any, *more: Any, **named: Any) -> Any:
        """Return a distributed optimizer, as this one is."""
        del cls
        return distribute(plain.from_config(config, *more, **named), state.settings)

    # Keras writes `__class__` into what it saves, and finds it there: it is the plain class, so that a model can be
    # loaded without hvdlite. `type()` and `isinstance()` see both.
    members = {"__class__": property(lambda self: plain), "from_config": classmethod(from_config)}
    made = type(plain.__name__, (_Distributed, plain), {**members, "__module__": plain.__module__})
    object.__setattr__(optimizer, "__class__", made)
    optimizer.__dict__["_hvd"] = state  # past Keras, which would follow it for variables


def _copied(plain: Any, saved: Any, kept: _Kept) -> Any:
    made = distribute(plain._unpickle_model(saved), kept.settings)
    for variable in kept.local:
        made.register_local_var(variable)
    return made


def _innermost(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _apply_through_values(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    own = optimizer.variables
    values, own_values = optimizer.stateless_apply([v.value for v in own], gradients, [v.value for v in variables])
    for variable, value in zip([*variables, *own], [*values, *own_values], strict=True):
        variable.assign(value)
