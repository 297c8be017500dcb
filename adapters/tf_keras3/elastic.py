"""`hvdlite.keras.elastic`, under the name that Horovod's scripts import."""

from __future__ import annotations

from typing import Any

from hvdlite.keras.elastic import (
    CommitStateCallback,
    HostsUpdatedInterrupt,
    KerasState,
    ObjectState,
    State,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

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


class TensorFlowKerasState(KerasState):
    """`KerasState`, as it is called in `hvdlite.tensorflow.elastic`.

    Args:
        backend: accepted; it changes nothing.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)
