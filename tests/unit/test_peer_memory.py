"""Copies between the ranks' tensors: only where every rank may, and what fails says so."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from hvdlite.comm import peer_memory
from hvdlite.comm.arena import address_of
from hvdlite.errors import CommunicationError
from hvdlite.testing.ranks import run_ranks


def rows(*pieces):
    return np.array(pieces, np.int64)


def test_it_reads_and_writes_pieces():
    def body(comm):
        peers = comm.peer_memory()
        mine = np.arange(100, dtype=np.uint8) + comm.rank
        at = [int(text) for text in comm.allgather_bytes(b"%d" % address_of(mine))]
        other = 1 - comm.rank
        found = np.zeros(5, np.uint8)
        peers.gather(other, rows((at[other] + 10, 2), (at[other] + 50, 3)), address_of(found), 5)
        assert found.tolist() == [10 + other, 11 + other, 50 + other, 51 + other, 52 + other]
        peers.read(other, at[other] + 99, address_of(found), 1)
        assert found[0] == 99 + other
        comm.barrier()
        peers.write(other, at[other], address_of(found), 1)
        peers.scatter(
            other,
            rows((at[other] + 1, 1), (at[other] + 3, 2)),
            rows((address_of(found) + 1, 2), (address_of(found) + 3, 1)),
            3,
        )
        comm.barrier()
        got = mine[:6].tolist()
        return got == [99 + comm.rank, 11 + comm.rank, 2 + comm.rank, 50 + comm.rank, 51 + comm.rank, 5 + comm.rank]

    assert run_ranks(2, body) == [True, True]


def test_what_is_not_memory_raises():
    def body(comm):
        peers = comm.peer_memory()
        with pytest.raises(CommunicationError, match="memory of rank 0 failed: Bad address"):
            peers.read(0, 8, address_of(np.zeros(8)), 8)
        return True

    assert run_ranks(2, body) == [True, True]


def test_ranks_on_two_hosts_have_none():
    assert run_ranks(2, lambda comm: comm.peer_memory(), hosts=["a", "b"]) == [None, None]


@pytest.mark.parametrize("fault", ["refused", "missing", "another process", "writes get lost"])
def test_one_rank_that_may_not_is_enough_for_none(monkeypatch, fault):
    real = peer_memory._function

    def function(name):
        call = real(name)

        def refused(*arguments):
            ctypes.set_errno(1)
            return -1

        def other_process(pid, mine, n, theirs, m, flags):
            return (ctypes.c_int64 * 2).from_address(mine)[1]  # and copies nothing

        if fault == "missing":
            raise AttributeError(name)
        if fault == "refused":
            return refused
        return call if fault == "writes get lost" and name == "process_vm_readv" else other_process

    changed = {}  # by thread, which plays a rank

    def lookup(name):
        return changed.get(threading.get_ident(), real)(name)

    def body(comm):
        if comm.rank == 1:
            changed[threading.get_ident()] = function
        return comm.peer_memory()

    monkeypatch.setattr(peer_memory, "_function", lookup)
    assert run_ranks(3, body) == [None, None, None]
