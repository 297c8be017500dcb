"""hvd.elastic for TensorFlow: training that goes on when ranks or hosts are lost, or new ones come.

@hvd.elastic.run
def train(state):
    ...
    state.commit()

train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvdlite import InvalidRequestError, init, shutdown
from hvdlite.elastic import HostsUpdatedInterrupt, ObjectState, State, run_fn, with_own_errors

from .functions import broadcast_variables

if TYPE_CHECKING:
    from hvdlite.tensorflow.keras.elastic import TensorFlowKerasState as TensorFlowKerasState

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "run", "State", "TensorFlowKerasState", "TensorFlowState"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function elastic. A decorator; what it does is told at `hvdlite.elastic.run`.

    A failed operation inside a `tf.function` counts as well, whatever TensorFlow makes of it.
    """
    return run_fn(with_own_errors(func, (tf.errors.OpError,)), _reset)


class TensorFlowState(ObjectState):
    """What an elastic training loop with variables of TensorFlow remembers.

        state = hvd.elastic.TensorFlowState([weights, bias], step=0)

    Nothing is sent before `sync()`, which `run` calls.

    Args:
        variables: on each rank in the same order, of the same shapes and dtypes.
        session: None; there are no sessions here.
        kwargs: as of `ObjectState`.

    Raises:
        InvalidRequestError: there are no variables, or there is a session.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise InvalidRequestError("TensorFlowState(session=...): sessions of TensorFlow 1 are not supported.")
        if variables is None:
            raise InvalidRequestError(
                "TensorFlowState: TensorFlow 2 keeps no list of all variables. Give the list of those to remember, or "
                "take TensorFlowKerasState(model, optimizer)."
            )
        self.variables = list(variables)
        self._values = _values_of(self.variables)
        super().__init__(None, None, **kwargs)

    def save(self) -> None:
        self._values = _values_of(self.variables)
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        if self.variables:
            broadcast_variables(self.variables, root_rank=0)
            self._values = _values_of(self.variables)
        super().sync()

    def to_commit(self) -> Any:
        return {"variables": self._values, "plain": self._saved}

    def from_commit(self, content: Any) -> None:
        values = content["variables"]
        if [value.shape for value in values] != [tuple(variable.shape) for variable in self.variables]:
            raise InvalidRequestError(
                f"TensorFlowState: the last commit has {len(values)} variables, this program "
                f"{len(self.variables)}, or others. Empty HVDLITE_ELASTIC_DIR to begin anew."
            )
        self._values = values
        super().from_commit(content["plain"])


def _reset() -> None:
    shutdown()
    init()


def _values_of(variables: Sequence[Any]) -> list[Any]:
    return [np.array(variable.numpy()) for variable in variables]


def __getattr__(name: str) -> Any:
    if name == "TensorFlowKerasState":  # whose module imports Keras, which takes its time
        from hvdlite.tensorflow.keras.elastic import TensorFlowKerasState

        return TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
