"""Every rank says on one line where it is, after a sum over all ranks. Then it ends as the arguments say.

report.py                     ends
report.py exit 3              rank 1 ends with exit code 3
report.py wait FILE           rank 0 makes FILE; all stay until they are ended
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd

hvd.init()
total = hvd.allreduce(np.array([hvd.rank() + 1.0]), op=hvd.Sum, name="total")
assert total[0] == hvd.size() * (hvd.size() + 1) / 2
line = (
    f"rank {hvd.rank()}/{hvd.size()} local {hvd.local_rank()}/{hvd.local_size()} "
    f"cross {hvd.cross_rank()}/{hvd.cross_size()} on {os.uname().nodename}\n"
)
os.write(1, line.encode())  # in one piece, so that lines of ranks do not mix
match sys.argv[1:]:
    case ["exit", code]:
        if hvd.rank() == 1:
            sys.exit(int(code))
        time.sleep(60)  # so that only the launcher can end it
    case ["wait", file]:
        hvd.barrier()
        if hvd.rank() == 0:
            Path(file).touch()
        time.sleep(1000)
