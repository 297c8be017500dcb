"""KerasState: a model and its optimizer among what an elastic training remembers, on any backend of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdlite import InvalidRequestError
from hvdlite.elastic import ObjectState

from .backends import port
from .models import broadcast_all, is_numeric
from .optimizer import variables_of


class KerasState(ObjectState):
    """What an elastic training with Keras remembers: variables of a model and of its optimizer, and plain objects.

        state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    Metrics are not remembered. When hvdlite has started again, the steps that Keras has compiled for the model are
    compiled anew, since they know the ranks that there were.

    Args:
        model: is built.
        optimizer: of Keras 3; None for that of the model, if it is compiled. It is built if it is not yet.
        kwargs: as of `ObjectState`.

    Raises:
        InvalidRequestError: the model is not built, or the optimizer is none of Keras 3.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise InvalidRequestError(
                f"{type(self).__name__}: the model has no variables yet. Give it a keras.Input, or call it once."
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not isinstance(self.optimizer, keras.optimizers.Optimizer):
            raise InvalidRequestError(
                f"{type(self).__name__}: expected an optimizer of Keras 3, got {type(self.optimizer).__module__}."
                f"{type(self.optimizer).__name__}."
            )
        self._values = self._values_now()
        super().__init__(None, None, **kwargs)

    def save(self) -> None:
        self._values = self._values_now()
        super().save()

    def restore(self) -> None:
        self._leave_step()
        for variable, value in zip(self._variables(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the state of rank 0, local variables included. Collective."""
        broadcast_all(self._variables(), 0, type(self).__name__)
        self._values = self._values_now()
        super().sync()

    def reset(self) -> None:
        for name in ("train_function", "test_function", "predict_function"):
            setattr(self.model, name, None)
        port.forget_compiled()

    def to_commit(self) -> Any:
        return {"variables": self._values, "plain": self._saved}

    def from_commit(self, content: Any) -> None:
        values, variables = content["variables"], self._variables()
        if [value.shape for value in values] != [tuple(variable.shape) for variable in variables]:
            raise InvalidRequestError(
                f"{type(self).__name__}: the last commit is of another model or optimizer: it has {len(values)} "
                f"variables, and here are {len(variables)}, or their shapes differ. Make both as in the start before, "
                "or empty HVDLITE_ELASTIC_DIR to begin anew."
            )
        self._values = values
        super().from_commit(content["plain"])

    def _variables(self) -> list[Any]:
        optimizer = self.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        metrics = {id(v) for v in getattr(self.model, "metrics_variables", ())}
        listed = [v for v in self.model.variables if id(v) not in metrics] + variables_of(optimizer)
        return [v for v in {id(v): v for v in listed}.values() if is_numeric(v)]  # a seed may be there twice

    def _values_now(self) -> list[Any]:
        if hasattr(self.model, "jax_state_sync"):  # within fit() the variables have no values on JAX
            self.model.jax_state_sync()
        return _copies(self._variables())

    def _leave_step(self) -> None:
        """Have Keras forget the values that a step on JAX has got, which are gone if it failed."""
        if hasattr(self.model, "jax_state_sync"):
            self.model._jax_state, self.model._jax_state_synced = None, True


def _copies(variables: Sequence[Any]) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(v.value)).reshape(v.shape) for v in variables]
