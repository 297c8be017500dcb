"""Every way to end a program that is no failure. All ranks end with status 0."""

from __future__ import annotations

import contextlib
import sys
import time

import numpy as np

import hvdlite as hvd

hvd.init()
assert float(hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()
way = sys.argv[1]
if way == "exit(0)":
    sys.exit(0)
elif way == "exit(None)":
    sys.exit()
elif way == "caught exit":
    with contextlib.suppress(SystemExit):
        sys.exit(4)
    try:
        sys.exit("caught, too")
    except SystemExit as error:
        assert error.code == "caught, too"
elif way == "caught error":
    with contextlib.suppress(hvd.MismatchError):
        hvd.allreduce(np.ones(1 + hvd.rank()), name="w")
elif way == "shutdown":
    hvd.shutdown()
elif way == "late ranks":
    time.sleep(0.7 * hvd.rank())
elif way == "one shuts down":
    rank = hvd.rank()
    if rank == 1:
        hvd.shutdown()
    time.sleep(0.2 * rank)
elif way == "pending":
    hvd.allreduce_async(np.ones(2), name="never waited for")
    if hvd.rank() == 0:
        hvd.allreduce_async(np.ones(2), name="of one rank only")
elif way != "falling off":
    raise AssertionError(way)
