"""Trains a number elastically while ranks die. Arguments: steps, ranks that die (`1,3`), and when.

`collective`: just after they began to reduce step 5. `commit`: when they have saved that step. `recovery`: the first
one as in `collective`, the others when hvdlite runs again. `stuck`: as `collective`, and rank 0 never hears of it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np

import hvdlite as hvd

steps, moment = int(sys.argv[1]), sys.argv[3]
hvd.init()
first_rank = hvd.rank()
place = [int(rank) for rank in sys.argv[2].split(",")].index(first_rank) if str(first_rank) in sys.argv[2] else None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(hvd.elastic.ObjectState):
    def save(self):
        super().save()
        if moment == "commit" and place is not None and getattr(self, "step", 0) == 5:
            die()

    def reset(self):
        if moment == "recovery" and place:
            die()


@hvd.elastic.run
def train(state):
    while state.step < steps:
        if state.step == 5 and hvd.size() == 4:
            if place == 0 if moment == "recovery" else place is not None and moment != "commit":
                hvd.allreduce_async(np.ones(10**6), name="last")  # the others are in it, or come to it
                die()
            if moment == "stuck" and first_rank == 0:
                threading.Event().wait()
            hvd.allreduce(np.ones(10**6), name="last")
        # The same for any number of ranks, unless a step is lost or repeated.
        state.value = state.value * 3 + hvd.allreduce(np.array([state.step]), name="step")[0]
        state.step += 1
        state.commit()


state = Mortal(step=0, value=np.int64(0))
train(state)
everyone = hvd.allgather_object((first_rank, int(state.value)))
if hvd.rank() == 0:
    print(f"done {everyone}", flush=True)
