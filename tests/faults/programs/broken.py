"""All ranks reduce for ever, and one is broken in the way of the first argument: `none`, or one of faults.Fault.

Says "working" when all have begun, so that the test can do harm from outside.
"""

from __future__ import annotations

import contextlib
import sys

import numpy as np

import hvdlite as hvd
from hvdlite.testing import faults

HARMLESS = ("slow", "delay")

hvd.init()
kind, elements = sys.argv[1], int(sys.argv[2])
gradients = np.arange(elements, dtype=np.float32) + hvd.rank()
mean = np.arange(elements) + (hvd.size() - 1) / 2
for _ in range(3):
    hvd.allreduce(gradients, name="gradients")
if hvd.rank() == 0:
    print("working", flush=True)
broken = contextlib.nullcontext() if kind == "none" else faults.inject(kind, rank=1, number=5)
with broken:
    for _ in range(10 if kind in HARMLESS else 10**9):
        found = hvd.allreduce(gradients, name="gradients")
np.testing.assert_array_equal(found, mean)
print("done", flush=True)
