"""Map shared memory in the given directory, say so, and wait to be killed."""

import os
import sys
import time

from hvdlite.comm import mpi
from hvdlite.config import Config

world = mpi.world(config=Config(shared_memory_dir=sys.argv[1]))
segment = world.shared_segment(1_000_000)
segment.block(world.rank)[:] = 1
blocks = world.shared_blocks(1_000_000)
blocks[world.rank][:] = 1
segment.barrier()
pids = world.allgather_bytes(str(os.getpid()).encode())
if world.rank == 0:
    print(b" ".join(pids).decode(), flush=True)
time.sleep(600)
