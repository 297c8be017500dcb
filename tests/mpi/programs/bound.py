"""Ranks that are bound to cores, those of rank r in argument r (`0,1`), as a launcher would bind them."""

from __future__ import annotations

import os
import sys

import numpy as np

place = int(next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ))
os.sched_setaffinity(0, {int(core) for core in sys.argv[1 + place].split(",")})

import hvdlite as hvd  # noqa: E402

hvd.init()
total = sum(hvd.allreduce(np.full(5, hvd.rank() + 1.0), op=hvd.Sum, name="w")[step % 5] for step in range(200))
print(f"total {total:.0f}", flush=True)
