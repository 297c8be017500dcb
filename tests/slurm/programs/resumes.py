"""Counts steps, and writes down where it is when told by USR1; started again it goes on from there.

resumes.py CHECKPOINT LAST
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd

told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
hvd.init()
checkpoint, last = Path(sys.argv[1]), int(sys.argv[2])
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
hvd.barrier()
if hvd.rank() == 0:
    print(f"from step {step}", flush=True)
while step < last:
    step += 1
    time.sleep(0.01)
    # The signal reaches the ranks at different steps, so they stop at the first one after which one of them has it.
    if hvd.allreduce(np.array([float(bool(told))]), op=hvd.Max, name="told")[0]:
        if hvd.rank() == 0:
            checkpoint.write_text(str(step))
        break
hvd.barrier()
if hvd.rank() == 0:
    print(f"until step {step}", flush=True)
