"""Shared segments: the file behind them. (What they do is in tests/conformance/test_communicator.py.)"""

from __future__ import annotations

import errno
import os
import stat

import pytest

from hvdlite.comm import segment as segments
from hvdlite.comm.segment import map_shared, segment_bytes
from hvdlite.errors import CommunicationError
from hvdlite.testing.ranks import run_ranks


def map_on(comm, nbytes, directory):
    return map_shared(comm.rank, comm.size, nbytes, comm.allgather_bytes, str(directory))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 10_001])
def test_all_ranks_map_the_same_zeroed_bytes_and_no_name_remains(tmp_path, size, nbytes):
    def body(comm):
        mapping = map_on(comm, nbytes, tmp_path)
        assert len(mapping) == segment_bytes(size, nbytes)
        assert not any(mapping[:])
        comm.barrier()
        mapping[comm.rank] = comm.rank + 1
        comm.barrier()
        assert list(mapping[:size]) == list(range(1, size + 1))
        mapping.close()

    run_ranks(size, body)
    assert os.listdir(tmp_path) == []


def test_the_file_is_private_while_it_has_a_name(tmp_path):
    path = segments._create_file(str(tmp_path), 5000)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.path.getsize(path) == 5000


@pytest.mark.parametrize("directory", ["/nonexistent", "/proc"])
def test_a_directory_that_cannot_be_used_means_none_on_all_ranks(directory):
    assert run_ranks(3, lambda comm: map_on(comm, 100, directory)) == [None] * 3


def test_too_little_room_means_none_before_anything_is_written(tmp_path):
    room = os.statvfs(tmp_path)
    too_much = room.f_bavail * room.f_frsize + 1
    assert run_ranks(2, lambda comm: map_on(comm, too_much, tmp_path)) == [None] * 2
    assert os.listdir(tmp_path) == []


def test_ranks_that_disagree_leave_no_file(tmp_path):
    def body(comm):
        with pytest.raises(CommunicationError, match=r"different lengths, in bytes: \[0, 1, 2\]"):
            map_on(comm, comm.rank, tmp_path)

    run_ranks(3, body)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("unlucky", [0, 1, 2])
def test_room_that_runs_out_on_one_rank_means_none_on_all(tmp_path, monkeypatch, unlucky):
    reserve = os.posix_fallocate
    start_of = {rank: segments._flag_bytes(3) + rank * segments._block_stride(9000) for rank in (1, 2)}

    def full(fd, start, length):
        if start == start_of.get(unlucky, 0):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, start, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert run_ranks(3, lambda comm: map_on(comm, 9000, tmp_path)) == [None] * 3
    assert os.listdir(tmp_path) == []


def test_an_older_kernel_without_populate_works_too(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_POPULATE_READ", 12345)
    monkeypatch.setattr(segments, "_POPULATE_WRITE", 12345)
    for mapping in run_ranks(2, lambda comm: map_on(comm, 10, tmp_path)):
        mapping.close()


def test_blocks_outlive_the_segment_they_came_from():
    def body(comm):
        segment = comm.shared_segment(8)
        block = segment.block(comm.rank)
        segment.close()
        block[:] = 7
        return int(block.sum())

    assert run_ranks(2, body) == [56, 56]
