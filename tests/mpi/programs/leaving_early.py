"""Rank 1 ends its program while the others still need it; they say so."""

from __future__ import annotations

import sys

import numpy as np

import hvdlite as hvd

hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    sys.exit(0)
try:
    hvd.allreduce(np.ones(1), name="w")
except hvd.ShutdownError as error:
    print(f"rank {hvd.rank()} heard: {error}", flush=True)
