"""init(comm=...): ranks in another order, some ranks only, an mpi4py communicator, and MPI of the user's own."""

from __future__ import annotations

import sys

import numpy as np

import hvdlite as hvd


def numbers() -> list[int]:
    return [int(x) for x in hvd.allgather(np.array([MPI.COMM_WORLD.rank]))]


what = sys.argv[1]
from mpi4py import MPI  # noqa: E402  its import starts MPI, which then is this program's

world = MPI.COMM_WORLD
if what == "reversed":
    for _ in range(2):
        hvd.init(comm=reversed(range(world.size)))
        assert hvd.rank() == world.size - 1 - world.rank
        assert numbers() == list(reversed(range(world.size)))
        hvd.shutdown()
elif what == "some":
    members = [2, 0]
    if world.rank in members:
        hvd.init(comm=members)
        assert hvd.size() == 2
        assert hvd.rank() == members.index(world.rank)
        assert numbers() == members
    else:
        try:
            hvd.init(comm=members)
        except ValueError as error:
            assert f"rank {world.rank}" in str(error), error
            assert not hvd.is_initialized()
        else:
            raise AssertionError("a rank that is not in the list was let in")
elif what == "communicator":
    color = world.rank % 2
    half = world.Split(color, -world.rank)
    hvd.init(comm=half)
    assert hvd.size() == half.size
    assert hvd.rank() == half.rank
    assert numbers() == [r for r in reversed(range(world.size)) if r % 2 == color]
    assert hvd.global_process_set.mpi_comm is half
    hvd.shutdown()
    assert half.allreduce(1) == half.size  # it was duplicated, and is still the user's
    half.Free()
elif what == "set of a communicator":
    pair = world.Split(world.rank // 2, world.rank)
    mine = hvd.ProcessSet(pair)
    assert mine.ranks is None
    for _ in range(2):
        hvd.init(process_sets=[mine])
        assert mine.ranks == [world.rank // 2 * 2 + i for i in range(pair.size)]
        assert mine.process_set_id == 1 + world.rank // 2
        assert str(mine).startswith(
            f"ProcessSet(process_set_id={1 + world.rank // 2}, ranks={mine.ranks}, mpi_comm=<mpi4py"
        )
        assert int(hvd.allreduce(world.rank, op=hvd.Sum, process_set=mine)) == sum(mine.ranks)
        hvd.shutdown()
elif what == "mine":
    hvd.init()
    assert hvd.mpi_enabled()
    assert hvd.mpi_threads_supported()
    hvd.allreduce(1.0)
    hvd.shutdown()
    assert not MPI.Is_finalized()
    assert world.allreduce(world.rank) == sum(range(world.size))
    hvd.init()
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == world.size
    assert world.allreduce(1) == world.size  # while hvdlite runs
elif what == "wrong":
    for wrong in (3.5, [0, 0], [0, world.size], object()):
        try:
            hvd.init(comm=wrong)
        except ValueError:
            assert not hvd.is_initialized()
        else:
            raise AssertionError(wrong)
    hvd.init()
else:
    raise AssertionError(what)
print("done", flush=True)
