"""Trains numbers elastically for tests of hvdrun, and keeps account of samples. Arguments: a folder, what happens.

`collective`, `commit` and `recovery` with numbers of ranks: these are killed by SIGKILL while the others wait for them
in an operation, while a commit is on its way to the disk, or first in an operation and then again at the next start.
`preempt`: hvdrun, whose process is in the file `pid`, gets SIGUSR1. `sizes` with numbers: the file `hosts` is changed
so that the job grows and shrinks. Steps that rank 0 has begun are in the file `steps`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd

folder, what, numbers = Path(sys.argv[1]), sys.argv[2], [int(word) for word in sys.argv[3:]]
STEPS, EVENT, BATCH, MOST = 12, 5, 12, 4000


def first_time(name: str) -> bool:
    """Return whether this rank does this for the first time in the job."""
    try:
        (folder / f"{name}-{hvd.rank()}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die(*ignored) -> None:
    time.sleep(0.2)  # the others are waiting by now
    os.kill(os.getpid(), signal.SIGKILL)


def happen(step: int) -> None:
    if step != EVENT:
        return
    if what in ("collective", "recovery") and hvd.rank() in numbers and first_time("killed"):
        die()
    if what == "commit" and hvd.rank() in numbers and first_time("killed"):
        if hvd.rank():
            hvd.elastic.State.commit = die
        else:
            os.fsync = die  # the file is there in part
    if what == "preempt" and hvd.rank() == 0 and first_time("told"):
        os.kill(int((folder / "pid").read_text()), signal.SIGUSR1)


def grow_or_shrink(state, begun: int) -> bool:
    """Return whether all sizes have been there."""
    if state.step == begun + 2 and len(state.sizes) < len(numbers) and hvd.rank() == 0:
        (folder / "hosts.new").write_text(f"localhost:{numbers[len(state.sizes)]}\n")
        os.replace(folder / "hosts.new", folder / "hosts")
    return len(state.sizes) == len(numbers) and state.step == begun + 2


def digest(state) -> str:
    return hashlib.sha256(state.weights.tobytes() + state.counts.tobytes() + str(state.step).encode()).hexdigest()


@hvd.elastic.run
def train(state) -> None:
    begun = state.step
    state.sizes = [*state.sizes, hvd.size()]
    states = set(hvd.allgather_object(digest(state)))
    if hvd.rank() == 0:
        print(f"begin {hvd.size()} {len(states)}", flush=True)
    while (not grow_or_shrink(state, begun)) if what == "sizes" else state.step < STEPS:
        if hvd.rank() == 0:
            with open(folder / "steps", "a") as file:
                file.write(f"{state.step}\n")
        happen(state.step)
        samples = [n for n in range(state.step * BATCH, (state.step + 1) * BATCH) if n % hvd.size() == hvd.rank()]
        gradient = np.zeros(3, np.int64)
        seen = np.zeros(MOST, np.int64)
        for n in samples:
            gradient += [n, n * n, 1]
            seen[n] += 1
        state.weights = state.weights * 3 + hvd.allreduce(gradient, op=hvd.Sum, name="gradient")
        state.counts = state.counts + hvd.allreduce(seen, op=hvd.Sum, name="seen")
        state.step += 1
        time.sleep(0.05 if what == "sizes" else 0)
        state.commit()


hvd.init()
if what == "recovery" and hvd.rank() in numbers and (folder / f"killed-{hvd.rank()}").exists() and first_time("again"):
    die()
state = hvd.elastic.ObjectState(step=0, weights=np.zeros(3, np.int64), counts=np.zeros(MOST, np.int64), sizes=[])
train(state)
everyone = hvd.allgather_object(digest(state))
if hvd.rank() == 0:
    print("end", json.dumps({
        "ranks": len(everyone), "states": len(set(everyone)), "sizes": state.sizes, "steps": state.step,
        "weights": state.weights.tolist(), "counts": np.bincount(state.counts).tolist(),
    }), flush=True)  # fmt: skip
