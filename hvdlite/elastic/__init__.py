"""hvd.elastic: training that goes on when ranks or hosts are lost, or new ones come.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

    train(hvd.elastic.ObjectState(epoch=0, weights=weights))

`hvdlite.torch.elastic` has a state that knows models and optimizers.
"""

from hvdlite.elastic.loop import run, run_fn
from hvdlite.elastic.state import ObjectState, State
from hvdlite.errors import HostsUpdatedInterrupt

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "run", "run_fn"]
