"""Runs steps that repeat, with something else in between now and then, over MPI. Arguments: hosts to pretend, steps.

Prints how many of the ranks' operations ran in a schedule, and fails where a result is wrong.
"""

from __future__ import annotations

import sys

import numpy as np

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.comm import mpi

n_hosts, n_steps = map(int, sys.argv[1:])
rank, size = mpi.start()
world = mpi.world(host=f"host{rank * n_hosts // size}" if n_hosts > 1 else None)


def check(result, name: str, step: int) -> None:
    assert result.tolist() == [sum((r + 1) * (step + len(name)) for r in range(size))] * 5, (name, step, result)


def mine(name: str, step: int):
    return np.full(5, float((rank + 1) * (step + len(name))))


def followed() -> bool:
    return runtime.current().engine_of(0).is_scheduled


with runtime.as_rank(world):
    hvd.init()
    seen = 0
    for step in range(n_steps):
        names = ["w" * n for n in range(1, 9)]
        order = names if rank % 2 else names[::-1]
        handles = {name: hvd.allreduce_async(mine(name, step), op=hvd.Sum, name=name) for name in order}
        for name in names:
            check(hvd.synchronize(handles[name]), name, step)
        check(hvd.allreduce(mine("", step), op=hvd.Sum), "", step)
        seen += followed()
        if step % 20 == 19:
            check(hvd.allreduce(mine("odd", step), op=hvd.Sum, name=f"odd{step}"), "odd", step)
        if step % 30 == 29:
            hvd.barrier()
    counts = hvd.allgather(np.array([seen]), name="counts").tolist()
    hvd.shutdown()
if rank == 0:
    print(min(counts), flush=True)
