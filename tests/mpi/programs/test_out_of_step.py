"""Tests that go wrong on one rank, for the lockstep plugin (tests/mpi/test_lockstep.py)."""

import threading

import pytest

from hvdlite.comm import mpi


@pytest.fixture
def rank():
    return mpi.MPI.COMM_WORLD.rank


@pytest.fixture
def broken_on_rank_1(rank):
    assert rank != 1, "no set-up here"


def test_fails_on_rank_1(rank):
    assert rank != 1, "only here"


def test_set_up_fails_on_rank_1(broken_on_rank_1):
    pass


def test_passes_in_step():
    pass


def test_hangs_on_rank_1(rank):
    if rank == 1:
        threading.Event().wait()
