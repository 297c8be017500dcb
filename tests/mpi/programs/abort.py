"""The last rank aborts while the others wait, each in another way."""

import math

import numpy as np

from hvdlite.comm import mpi

world = mpi.world()
segment = world.shared_segment(8)
world.barrier()
if world.rank == world.size - 1:
    world.abort(7)
elif world.rank == 0:
    segment.barrier()
elif world.rank == 1:
    world.wait(math.inf)
    while True:
        world.wait(math.inf)
else:
    world.recv(np.zeros(1), world.size - 1)
print(f"rank {world.rank} survived")
