"""Doorbells: the pipes of processes, here rung by threads, and the locks of threads."""

from __future__ import annotations

import math
import os
import threading

import pytest

from hvdlite.comm.doorbell import FifoDoorbells, Spinner, ThreadDoorbells, open_doorbells
from hvdlite.errors import CommunicationError
from hvdlite.testing.ranks import run_ranks


def fifo_bells(size: int, directory: str) -> list[FifoDoorbells]:
    def body(comm):
        return open_doorbells(range(comm.size), comm.rank, comm.allgather_bytes, [directory])

    return run_ranks(size, body)


@pytest.fixture(params=["fifo", "thread"])
def bells(request, tmp_path):
    """The doorbells of three ranks."""
    if request.param == "thread":
        yield ThreadDoorbells.group(3)
        return
    group = fifo_bells(3, str(tmp_path))
    yield group
    for one in group:
        one.close()


def test_a_ring_before_the_wait_counts(bells):
    bells[1].ring(0)
    assert bells[0].wait(math.inf)


def test_several_rings_are_one(bells):
    for rank in (0, 1, 2):
        bells[rank].ring(0)
    assert bells[0].wait(0)
    assert not bells[0].wait(0)


def test_a_ring_is_for_one_rank(bells):
    bells[0].ring(1)
    assert not bells[0].wait(0)
    assert not bells[2].wait(0)
    assert bells[1].wait(0)


@pytest.mark.parametrize("eager", [False, True])
def test_every_ring_is_heard(bells, eager):
    n = 300

    def answer():
        for _ in range(n):
            while not bells[1].wait(math.inf, eager):
                pass
            bells[1].ring(0)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    for _ in range(n):
        bells[0].ring(1)
        while not bells[0].wait(math.inf, eager):
            pass
    thread.join()


def test_a_nudge_ends_a_sleep_and_a_ready_rank_does_not_sleep(bells):
    flag = []
    bells[0].sleep_for(1, lambda: True, math.inf)

    def sleep():
        while not flag:
            bells[0].sleep_for(1, lambda: bool(flag), 5.0)

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    flag.append(1)
    bells[1].nudge(0)
    thread.join(10)
    assert not thread.is_alive()


def test_ringing_never_blocks(bells):
    for _ in range(200_000):  # more than a pipe holds
        bells[1].ring(0)
    assert bells[0].wait(0)


def test_names_are_gone_once_all_have_opened(tmp_path):
    group = fifo_bells(3, str(tmp_path))
    assert os.listdir(tmp_path) == []
    group[0].ring(2)
    assert group[2].wait(0)
    for one in group:
        one.close()


def test_closing_gives_all_descriptors_back(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for one in fifo_bells(4, str(tmp_path)):
        one.close()
        one.close()
        one.ring(0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_hosts_have_bells_of_their_own(tmp_path):
    def body(comm):
        local = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
        mine = open_doorbells(local, comm.rank, comm.allgather_bytes, [str(tmp_path)])
        assert (mine.rank, mine.size) == (comm.rank // 2, len(local))
        if mine.rank == 0:
            for rank in range(mine.size):
                mine.ring(rank)
        comm.barrier()
        heard = mine.wait(0)
        mine.close()
        return heard

    assert run_ranks(5, body) == [True] * 5


def test_a_directory_that_cannot_be_used_is_passed_over():
    (one,) = fifo_bells(1, "/nonexistent")
    one.close()


def test_ranks_that_share_no_files_are_all_told(tmp_path, monkeypatch):
    def body(comm):
        exchange = comm.allgather_bytes
        if comm.rank == 1:  # on another machine that has the same name
            place = b"/nonexistent/elsewhere\n"

            def exchange(mine):
                said = comm.allgather_bytes(mine)
                return [place, place] if b"/" in said[0] and not said[1].strip() else said

        with pytest.raises(CommunicationError, match=r"cannot open the pipes .* \(on rank 1\). Set TMPDIR") as caught:
            open_doorbells([0, 1], comm.rank, exchange, [str(tmp_path)])
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert os.listdir(tmp_path) == []


def test_spinning_in_vain_is_given_up_and_taken_up_again():
    words = memoryview(bytearray(8)).cast("q")
    spinner, n_spins = Spinner(1e-6), 0
    for _ in range(200):
        n_spins += spinner._skip == 0
        assert not spinner.sees(words, 0, 1)
    assert n_spins < 10  # 1, 3, 7, 15, 31, 63, 63 … waits apart
    words[0] = 1
    while spinner._skip:
        assert spinner.sees(words, 0, 1)
    assert spinner.sees(words, 0, 1)
    assert spinner._failures == 0


def test_where_ranks_outnumber_cores_each_turn_yields_and_no_wait_is_skipped(monkeypatch):
    spinner, words, yields = Spinner(5e-6, crowded=True), memoryview(bytearray(8)).cast("q"), []

    def let_others_run():
        yields.append(1)
        if len(yields) == 25:
            words[0] = 1

    monkeypatch.setattr("os.sched_yield", let_others_run)
    assert not spinner.sees(words, 0, 1)
    assert not spinner.sees(words, 0, 1)
    assert len(yields) == 20
    assert spinner.sees(words, 0, 1)  # as soon as another rank has set it
    assert len(yields) == 25


def test_a_spinner_without_time_sleeps_at_once():
    words = memoryview(bytearray(8)).cast("q")
    assert not Spinner(0.0).sees(words, 0, 1)
    words[0] = 5
    assert Spinner(0.0).sees(words, 0, 5)
