"""Rank 1 of 3 fails in the way of the first argument, while the others do what the second one says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

import hvdlite as hvd
from hvdlite.lowlevel import register_kernel


def fail(way: str) -> None:
    if way == "raise":
        raise RuntimeError("out of luck\nin two lines")
    if way == "exit":
        sys.exit(5)
    if way == "exit with text":
        sys.exit("no data found")
    if way == "argparse":
        import argparse

        argparse.ArgumentParser(prog="train").parse_args(["--no-such-option"])
    if way == "exit, with a thread waiting":
        threading.Thread(target=hvd.allreduce, args=(np.ones(3),), kwargs={"name": "of this thread only"}).start()
        sys.exit(5)
    if way == "os._exit":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if way == "interrupt while waiting":
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        hvd.allreduce(np.ones(3), name="nobody else comes to this")
    if way == "engine":
        fail_in_the_engine()
    if way == "mismatch":
        hvd.allreduce(np.ones(2), name="w")
    raise AssertionError(way)


def fail_in_the_engine() -> None:
    """Break in the middle of a transfer, and carry on as if nothing had happened."""

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    register_kernel(np.dtype(np.float16), hvd.Sum, broken)
    try:
        hvd.allreduce(np.ones(100, np.float16), op=hvd.Sum, name="half")
    except hvd.HorovodInternalError as error:
        assert "the engine of rank 1 stopped: MemoryError: no room" in str(error), error
    time.sleep(60)


def work(kind: str) -> None:
    if kind == "half":
        hvd.allreduce(np.ones(100, np.float16), op=hvd.Sum, name="half")
        time.sleep(60)
    elif kind == "collective":
        hvd.allreduce(np.ones(3), name="w")
    elif kind == "sleeping":
        time.sleep(60)
    elif kind == "computing":
        x = np.ones((300, 300))
        while True:
            x = x @ x / 300
    raise AssertionError("this rank was not ended")


hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    time.sleep(0.3)  # so that the others are at their work
    fail(sys.argv[1])
work(sys.argv[2])
