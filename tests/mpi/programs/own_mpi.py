"""A program that starts MPI itself (argument: program), or has told mpi4py not to (argument: nobody)."""

import sys

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402  after what it is told

if sys.argv[1] == "program":
    MPI.Init_thread(MPI.THREAD_MULTIPLE)

from hvdlite.comm import mpi  # noqa: E402
from hvdlite.errors import CommunicationError  # noqa: E402

for _ in range(2):
    world = mpi.world()
    assert world.allgather_bytes(b"x") == [b"x"] * world.size
    world.close()

assert MPI.Is_initialized() and not MPI.Is_finalized()
if sys.argv[1] == "program":
    MPI.Finalize()
    try:
        mpi.world()
    except CommunicationError as error:
        assert "MPI was finalised" in str(error)
    else:
        raise AssertionError("a world after MPI_Finalize")
print("done", flush=True)
