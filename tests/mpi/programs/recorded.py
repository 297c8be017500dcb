"""Records a timeline, in the way that the first argument names; the others are the number of steps and the file."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd

QUIET = 0.2  # seconds; the writer waits less, so that what has run is in the file

way, steps, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


def train() -> None:
    for step in range(steps):
        assert hvd.allreduce(np.full(7, hvd.rank() + 1.0), op=hvd.Sum, name="w")[step % 7] == sum(range(hvd.size() + 1))


def recorded() -> int:
    """Return how many allreduces are in the file, which must be valid now that it has stopped growing."""
    size = -1
    while size != path.stat().st_size:
        size = path.stat().st_size
        time.sleep(QUIET)
    events = json.loads(path.read_text() or "[]")
    return sum(event.get("name") == "ALLREDUCE" for event in events)


hvd.init()
train()
if way == "read while it runs" and hvd.rank() == 0:
    deadline = time.monotonic() + 10
    while recorded() < steps and time.monotonic() < deadline:
        pass
    print("read", recorded(), flush=True)
if way == "interrupt":
    if hvd.rank() == 0:
        time.sleep(QUIET)
        os.kill(os.getsid(0), signal.SIGINT)  # mpirun leads the session: what Ctrl-C does
        signal.pause()
    train()
if way == "kill":
    if hvd.rank() == 0:
        time.sleep(QUIET)
        os.kill(os.getpid(), signal.SIGKILL)
    train()
if way == "exit at once":
    sys.exit(3)
if way == "by call":
    hvd.start_timeline(path, mark_cycles=True)
    train()
    hvd.stop_timeline()
    hvd.stop_timeline()
    train()
