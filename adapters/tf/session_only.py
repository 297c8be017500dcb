"""Names that Horovod has for TensorFlow 1's sessions. Programs may import them; using them says what to do instead."""

from __future__ import annotations

from typing import NoReturn

_SESSIONS = "needs TensorFlow 1's sessions, which hvdlite does not serve"
_INSTEAD = "Call hvd.broadcast_variables(variables, root_rank) after the first step, or take the callback of hvd.keras."


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise: there is no list of global variables any more.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"broadcast_global_variables({root_rank}) {_SESSIONS}. {_INSTEAD}")


class BroadcastGlobalVariablesHook:
    """Cannot be made: a hook of `MonitoredTrainingSession`."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        raise RuntimeError(f"BroadcastGlobalVariablesHook(root_rank={root_rank}) {_SESSIONS}. {_INSTEAD}")


class LocalGradientAggregationHelper:
    """Cannot be made: an inner part of Horovod."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "LocalGradientAggregationHelper is not here. Take DistributedOptimizer(backward_passes_per_step=k) with an "
            "optimizer of Keras, or add k gradients up before DistributedGradientTape reduces them."
        )
