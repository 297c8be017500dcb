"""Prints the share of a core that a rank uses while it has nothing to do, and while it waits for another rank."""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

import hvdlite as hvd


def share(seconds: float, wait) -> float:
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    wait(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return used / (time.monotonic() - started)


seconds = float(sys.argv[1])
hvd.init()
hvd.add_process_set([0])  # its engine sleeps, too
for _ in range(20):
    hvd.allreduce(np.ones(10_000), name="w")
idle = share(seconds, time.sleep)


def blocked(seconds: float) -> None:
    if hvd.rank() == 0:
        time.sleep(seconds)
    hvd.allreduce(np.ones(3), name="late")


print(f"idle {idle:.4f} blocked {share(seconds, blocked):.4f}", flush=True)
