"""Trains until the file of what tuning found is there (argument 1), at most argument 2 steps."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import hvdlite as hvd

path, most = Path(sys.argv[1]), int(sys.argv[2])
hvd.init()
tensors = [np.empty(n, np.float32) for n in (200_000, 33, 150_001)]
for step in range(most):
    for tensor in tensors:
        tensor[:] = hvd.rank() + 1
    handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=f"t{i}") for i, t in enumerate(tensors)]
    for handle in handles:
        assert (hvd.synchronize(handle) == hvd.size() * (hvd.size() + 1) / 2).all()
    if step % 10 == 9 and hvd.broadcast_object(path.exists(), name="settled?"):
        break
print(f"trained {step + 1}", flush=True)
