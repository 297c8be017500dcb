"""Trains a number elastically, with a commit in each step, and tells what came out. Arguments: steps, and what happens.

`KILL` ends the last rank by SIGKILL at step 5 of the first start; `USR1` and `TERM` send rank 0 that signal there.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import hvdlite as hvd

steps, what = int(sys.argv[1]), sys.argv[2]
hvd.init()


@hvd.elastic.run
def train(state):
    begun = state.step
    while state.step < steps:
        if state.step == 5 and begun == 0:
            if what == "KILL" and hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if what != "KILL" and hvd.rank() == 0:
                os.kill(os.getpid(), signal.Signals[f"SIG{what}"])
        # The same for any number of ranks, unless a step is lost or repeated.
        state.value = state.value * 3 + hvd.allreduce(np.array([state.step]), name="step")[0]
        state.step += 1
        state.commit()
    return begun


state = hvd.elastic.ObjectState(step=0, value=np.int64(0))
begun = train(state)
everyone = hvd.allgather_object((begun, int(state.value), hvd.size()))
if hvd.rank() == 0:
    print(f"done {everyone}", flush=True)
