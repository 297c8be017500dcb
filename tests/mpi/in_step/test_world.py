"""How a group over MPI comes and goes."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from hvdlite.comm import mpi
from hvdlite.config import Config
from hvdlite.errors import CommunicationError, InvalidRequestError, NotMemberError

MPI = mpi.MPI
WORLD = MPI.COMM_WORLD


def test_a_closed_world_can_be_opened_again_and_keeps_nothing():
    def cycle():
        world = mpi.world()
        segment = world.shared_segment(10_000)
        segment.barrier()
        segment.close()
        world.close()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not MPI.Is_finalized()


def test_only_the_listed_ranks_call_and_their_order_counts():
    listed = [rank for rank in range(WORLD.size - 1, -1, -1) if rank != 1]
    if WORLD.rank == 1:
        with pytest.raises(NotMemberError, match=r"rank 1 is not one of the ranks"):
            mpi.world(ranks=listed)
        return
    world = mpi.world(ranks=listed)
    assert (world.rank, world.size) == (listed.index(WORLD.rank), len(listed))
    assert mpi.ranks_within(world, MPI.COMM_SELF) == [world.rank]
    world.close()


def test_a_communicator_of_the_program_is_duplicated_and_stays_the_programs():
    theirs = WORLD.Split(WORLD.rank % 2, -WORLD.rank)
    world = mpi.world(comm=theirs)
    assert (world.rank, world.size) == (theirs.rank, theirs.size)
    assert mpi.ranks_within(world, theirs) == list(range(theirs.size))
    if WORLD.size > 1:
        with pytest.raises(InvalidRequestError, match="members that are not among"):
            mpi.ranks_within(world, WORLD)
    world.barrier()
    world.close()
    theirs.Barrier()
    theirs.Free()


@pytest.mark.parametrize("ranks", [[0, 0], [-1], [0, 1000]])
def test_ranks_that_do_not_exist_are_named(ranks):
    with pytest.raises(InvalidRequestError, match="are not distinct ranks from 0"):
        mpi.world(ranks=ranks)


def test_ranks_and_communicator_exclude_each_other():
    with pytest.raises(InvalidRequestError, match="either ranks or"):
        mpi.world(ranks=[0], comm=WORLD)


def test_a_missing_directory_means_no_segment_for_anyone():
    world = mpi.world(config=Config(shared_memory_dir="/nonexistent"))
    assert world.shared_segment(100) is None
    world.barrier()  # the doorbells found another place
    world.close()


def test_no_room_on_one_rank_means_no_segment_for_anyone(comm, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(os, "posix_fallocate", full)
        assert comm.shared_segment(1_000_000) is None
    segment = comm.shared_segment(1_000_000)
    segment.barrier()
    segment.close()


def test_blocks_of_shared_memory_are_seen_by_all(comm):
    blocks = comm.shared_blocks(5000)
    assert [block.nbytes for block in blocks] == [5000] * comm.size and blocks[0].ctypes.data % 4096 == 0
    blocks[comm.rank][:] = comm.rank + 1
    comm.barrier()
    assert [set(block.tolist()) for block in blocks] == [{rank + 1} for rank in range(comm.size)]
    comm.barrier()


def test_ranks_read_each_others_memory(comm):
    peers = comm.peer_memory()
    assert peers is not None, "process_vm_readv is refused here"
    mine, found = np.full(10_000, comm.rank + 1.0), np.zeros(10_000)
    places = [int(text) for text in comm.allgather_bytes(str(mine.ctypes.data).encode())]
    for rank, place in enumerate(places):
        peers.read(rank, place, found.ctypes.data, found.nbytes)
        assert set(found.tolist()) == {rank + 1.0}
    comm.barrier()


def test_an_error_of_mpi_names_what_failed(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    assert comm.size > 1  # Open MPI does not notice it in a message to oneself
    transfer = comm.irecv(np.zeros(1, np.uint8), left)
    sending = comm.isend(np.zeros(9, np.uint8), right)
    with pytest.raises(CommunicationError, match=f"(?is)receiving from rank {left} failed. MPI says: .*trunc"):
        transfer.wait()
    sending.wait()


def test_the_library_says_what_it_is():
    assert "Open MPI" in mpi.library_version() or "MPICH" in mpi.library_version()
    assert mpi.thread_level() in ("single", "funneled", "serialized", "multiple")
