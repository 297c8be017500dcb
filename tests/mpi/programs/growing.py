"""Prints by how much resident memory grows over allreduces with fresh names, in MB."""

from __future__ import annotations

import os
import sys

import numpy as np

import hvdlite as hvd


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def step(k: int) -> None:
    x = np.full(100 + k % 50, float(hvd.rank()))
    result = hvd.allreduce(x, op=hvd.Sum, name=f"fresh.{k}")
    assert result[-1] == sum(range(hvd.size()))


n = int(sys.argv[1])
hvd.init()
for k in range(2000):  # fills the cache of 1024 names, and warms allocators up
    step(k)
before = resident()
for k in range(2000, 2000 + n):
    step(k)
print(f"grew {(resident() - before) / 1e6:.1f}", flush=True)
