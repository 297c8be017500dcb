"""hvd.elastic: training that goes on when ranks or hosts are lost, or new ones come.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

    train(hvd.elastic.ObjectState(epoch=0, weights=weights))

`hvdlite.torch.elastic`, `hvdlite.tensorflow.elastic` and `hvdlite.keras.elastic` have states that know models and
optimizers.
"""

from hvdlite.elastic.loop import run, run_fn
from hvdlite.elastic.state import ObjectState, State
from hvdlite.elastic.state import refuse_names_of_methods as refuse_names_of_methods
from hvdlite.elastic.told import with_own_errors as with_own_errors
from hvdlite.errors import HostsUpdatedInterrupt

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "run", "run_fn"]
