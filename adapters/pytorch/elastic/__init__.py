"""hvd.elastic for torch: training that goes on when ranks or hosts are lost, or new ones come.

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, epochs):
        for batch in loader:
            ...
            state.commit()

train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite import shutdown
from hvdlite.elastic import HostsUpdatedInterrupt, ObjectState, State, run_fn
from hvdlite.torch.lifecycle import init

from .sampler import ElasticSampler
from .state import TorchState

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "init",
    "ObjectState",
    "run",
    "shutdown",
    "State",
    "TorchState",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function elastic. A decorator; what it does is told at `hvdlite.elastic.run`."""
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
