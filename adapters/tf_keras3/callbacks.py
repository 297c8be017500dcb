"""The callbacks of `hvdlite.keras`, under the name that Horovod's scripts import."""

from __future__ import annotations

from typing import Any

from hvdlite.keras import callbacks
from hvdlite.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BestModelCheckpoint(callbacks.BestModelCheckpoint):
    """As of `hvdlite.keras`, with Horovod's other order of parameters."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(monitor, verbose, mode, save_freq, save_weights_only)
