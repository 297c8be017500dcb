"""The runner of threads as ranks: it never hangs, and never hides the cause."""

from __future__ import annotations

import contextlib
import threading

import pytest

from hvdlite.testing.ranks import RanksHangError, run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_results_come_in_rank_order(size):
    def body(comm):
        comm.barrier()
        return (comm.rank, comm.size)

    assert run_ranks(size, body) == [(rank, size) for rank in range(size)]


def test_the_first_cause_is_raised_and_names_its_rank():
    def body(comm):
        if comm.rank == 2:
            raise KeyError("the cause")
        comm.barrier()

    with pytest.raises(KeyError, match="the cause") as caught:
        run_ranks(4, body)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]


@pytest.mark.parametrize("error", [SystemExit(3), pytest.fail.Exception("failed in a rank")])
def test_nothing_that_ends_a_rank_is_lost(error):
    def body(comm):
        raise error

    with pytest.raises(type(error)):
        run_ranks(1, body)


def test_a_hang_is_shown_with_stacks_and_ended():
    def waits_for_rank_0(comm):
        if comm.rank > 0:
            comm.barrier()

    with pytest.raises(RanksHangError, match=r"ranks 1, 2 of 3 still ran after 0.2 s") as caught:
        run_ranks(3, waits_for_rank_0, timeout=0.2)
    assert "in waits_for_rank_0" in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_context_is_entered_on_the_thread_of_each_rank():
    state = threading.local()

    @contextlib.contextmanager
    def setup(comm):
        state.rank = comm.rank
        yield
        del state.rank

    assert run_ranks(3, lambda comm: state.rank, setup=setup) == [0, 1, 2]


def test_hosts_are_passed_on():
    assert run_ranks(2, lambda comm: comm.topology.hosts, hosts=["a", "b"]) == [("a", "b")] * 2
