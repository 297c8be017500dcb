"""hvd.elastic for Keras: training that goes on when ranks or hosts are lost, or new ones come.

state = hvd.elastic.KerasState(model, batch=0, epoch=0)

@hvd.elastic.run
def train(state):
    model.fit(…, initial_epoch=state.epoch, epochs=90, callbacks=[
        hvd.elastic.CommitStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ])

train(state)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite import shutdown
from hvdlite.elastic import HostsUpdatedInterrupt, ObjectState, State, run_fn, with_own_errors

from .backends import port
from .elastic_callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from .elastic_state import KerasState

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "run",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function elastic. A decorator; what it does is told at `hvdlite.elastic.run`.

    A failed operation inside a compiled step counts as well, whatever the backend makes of it.
    """
    return run_fn(with_own_errors(func, port.STEP_ERRORS), _reset)


def _reset() -> None:
    shutdown()
    port.init()
