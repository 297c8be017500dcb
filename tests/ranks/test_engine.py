"""The engine at work: it goes on by itself, lends its work to who waits, and says so when it breaks."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.lowlevel import register_kernel


def until(condition, seconds=10.0):
    """Return once `condition()`; a test that would wait longer has failed."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        threading.Event().wait(0.001)


def test_asynchronous_operations_finish_while_nobody_waits(on_ranks):
    def body(rank):
        handles = [hvd.allreduce_async(np.full(n, rank), op=hvd.Sum, name=f"t{n}") for n in (1, 1000, 200_000)]
        until(lambda: all(hvd.poll(handle) for handle in handles))
        return [int(handle.wait()[-1]) for handle in handles]

    assert on_ranks(3, body) == [[3, 3, 3]] * 3


def test_one_waits_while_others_work_asynchronously(on_ranks):
    # A blocking call makes its own thread drive the engine; what is in flight besides must go on afterwards.
    def body(rank):
        background = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="background") if rank != 2 else None
        sums = [float(hvd.allreduce(1.0, op=hvd.Sum, name="front")) for _ in range(5)]
        if rank == 2:
            background = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="background")
        until(lambda: hvd.poll(background))
        return sums, float(background.wait()[0])

    assert on_ranks(3, body) == [([3.0] * 5, 3.0)] * 3


def test_a_time_limit_ends_the_waiting_and_not_the_operation(on_ranks):
    late = threading.Event()

    def body(rank):
        if rank == 1:
            assert late.wait(10)
        handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="w")
        if rank == 0:
            with pytest.raises(TimeoutError, match="'w' is not done after 0.05 s"):
                handle.wait(0.05)
            late.set()
        until(lambda: hvd.poll(handle))
        return float(handle.wait()[0])

    assert on_ranks(2, body) == [2.0, 2.0]


def test_several_threads_may_wait_for_one_handle(on_ranks):
    def body(rank):
        found = []
        for k in range(20):
            handle = hvd.allreduce_async(np.array([rank + k]), op=hvd.Sum, name="w")
            waiters = [threading.Thread(target=lambda h=handle: found.append(h.wait())) for _ in range(3)]
            for waiter in waiters:
                waiter.start()
            found.append(handle.wait())
            for waiter in waiters:
                waiter.join(10)
            assert all(one is found[-1] for one in found[-4:])
        return [int(one[0]) for one in found[::4]]

    assert on_ranks(2, body) == [[1 + 2 * k for k in range(20)]] * 2


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_whose_engine_breaks_raises_the_cause_and_ends_the_others(on_ranks, monkeypatch, odd):
    monkeypatch.setenv("HVDLITE_EXIT_GRACE", "0.2")
    monkeypatch.setenv("HVDLITE_LOG_LEVEL", "fatal")

    def broken(*_):
        raise MemoryError("no room")

    ended = threading.Barrier(3)

    def body(rank):
        if rank == odd:
            register_kernel(np.dtype(np.float16), hvd.Sum, broken)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(np.ones(100, np.float16), op=hvd.Sum, name="half")
            hvd.allreduce(np.ones(100, np.float16), op=hvd.Sum, name="half again")  # the others may get one done
        if rank == odd:
            assert f"the engine of rank {odd} stopped: MemoryError: no room" in str(caught.value)
            assert isinstance(caught.value.__cause__, MemoryError)
        else:
            assert f"rank {odd} aborted all ranks" in str(caught.value)
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(1.0)
        ended.wait(10)

    on_ranks(3, body)


@pytest.mark.parametrize("waits", [False, True])
def test_what_breaks_while_the_engine_sleeps_fails_what_is_in_flight(on_ranks, monkeypatch, waits):
    # A lost rank shows in the sleep, also in that of the engine's own thread, which nobody sees end.
    monkeypatch.setenv("HVDLITE_EXIT_GRACE", "0.01")
    monkeypatch.setenv("HVDLITE_LOG_LEVEL", "fatal")

    def cut(timeout, eager=False):
        raise ConnectionError("the wire is cut")

    ended = threading.Barrier(2)

    def body(rank):
        if rank == 0:
            engine = runtime.current().engine_of(0)
            engine.comm.wait = cut
            handle = hvd.allreduce_async(np.ones(2), name="w")
            if not waits:
                until(lambda: hvd.poll(handle))
            with pytest.raises(hvd.HorovodInternalError, match="tensor 'w': the engine .* the wire is cut"):
                handle.wait()
        ended.wait(10)
        runtime.current().abandon(ConnectionError("the other rank is gone"))
        runtime.set_current(None)

    on_ranks(2, body)


def test_wrong_calls_are_told_to_ranks_that_come_much_later(on_ranks):
    told = threading.Event()

    def body(rank):
        if rank == 0:
            with pytest.raises(ValueError, match="scalar"):
                hvd.allgather(1.0, name="w")
            told.set()
        else:
            assert told.wait(10)
            with pytest.raises(hvd.RemoteError, match="rank 0: .*scalar"):
                hvd.allgather([1.0], name="w")
        hvd.barrier()

    on_ranks(3, body)


def test_reasons_name_the_backend_of_each_kind(on_ranks):
    def body(rank):
        assert hvd.backend_reasons() == {}
        hvd.allreduce(np.ones(3, np.float32))
        hvd.barrier()
        return hvd.backend_reasons()

    for reasons in on_ranks(2, body):
        assert "64 bytes of float32 (SUM)" in reasons["allreduce"]
        assert "2 ranks are on one host and share memory" in reasons["allreduce"]
        assert "barrier" in reasons
