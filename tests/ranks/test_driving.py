"""Who does the engine's work: the caller while it waits, else the engine's thread."""

import threading

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.lowlevel import Item, Kind, start


def begin(n, seen, name="x"):
    """Submit an allgather of `n` rows that notes the thread that allocates its result."""

    def allocate(shape):
        seen.append(threading.current_thread())
        array = np.empty(shape)
        return array.reshape(-1), array

    return start(Kind.ALLGATHER, [name], [Item(np.full(n, 1.0 + n), allocate=allocate)], hvd.global_process_set)[0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_caller_that_waits_does_the_work_itself(on_ranks, size):
    def body(rank):
        seen = []
        result = begin(rank + 1, seen).wait()
        return seen == [threading.current_thread()], result.tolist()

    expected = [2.0 + rank for rank in range(size) for _ in range(rank + 1)]
    assert on_ranks(size, body) == [(True, expected)] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_engines_thread_works_while_the_caller_does_not(on_ranks, size):
    def body(rank):
        seen, done = [], threading.Event()
        handle = begin(1, seen)
        handle.alert()
        while not handle.poll():
            done.wait(0.001)
        return seen[0].name, handle.wait().tolist()

    assert on_ranks(size, body) == [("hvdlite engine", [2.0] * size)] * size


def test_what_another_thread_submits_is_done_while_one_drives(on_ranks):
    def body(rank):
        transport = runtime.thread_transport()
        running = runtime.current()
        results = []

        def other():
            with runtime.as_rank(transport):
                runtime.set_current(running)
                try:
                    results.append(hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum, name="other").item())
                finally:
                    runtime.set_current(None)

        # Rank 0 waits for "main", which the others submit only when "other" is done everywhere.
        if rank == 0:
            handle = hvd.allreduce_async(np.array([1.0]), op=hvd.Sum, name="main")
            thread = threading.Thread(target=other)
            thread.start()
            value = handle.wait().item()
            thread.join()
        else:
            other()
            value = hvd.allreduce(np.array([1.0]), op=hvd.Sum, name="main").item()
        return value, results

    assert on_ranks(3, body) == [(3.0, [6.0])] * 3


class Interrupted(BaseException):
    """What a signal handler raises."""


def test_an_interrupt_while_waiting_leaves_the_operation_to_the_engines_thread(on_ranks, monkeypatch):
    def body(rank):
        engine = runtime.current().engine_of(0)
        sleep = engine.comm.wait
        if rank == 0:

            def interrupted(timeout, eager=False):
                if threading.current_thread() is not engine_thread(engine):
                    raise Interrupted
                sleep(timeout, eager)

            monkeypatch.setattr(engine.comm, "wait", interrupted)
            seen = []
            handle = begin(1, seen)
            with pytest.raises(Interrupted):
                handle.wait()
            monkeypatch.undo()
            go.set()
            return handle.wait().tolist(), hvd.allreduce(np.ones(1), op=hvd.Sum).item()
        go.wait(10)
        return begin(1, []).wait().tolist(), hvd.allreduce(np.ones(1), op=hvd.Sum).item()

    go = threading.Event()
    assert on_ranks(2, body) == [([2.0, 2.0], 2.0)] * 2


def engine_thread(engine):
    return engine._thread


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_middle_of_an_operation_reaches_the_caller(on_ranks, kind):
    def interrupted(_):
        raise kind

    def body(rank):
        handle = start(Kind.ALLGATHER, ["x"], [Item(np.ones(3), allocate=interrupted)], hvd.global_process_set)[0]
        with pytest.raises(kind):
            handle.wait()
        with pytest.raises(hvd.HorovodInternalError, match=kind.__name__):
            hvd.allreduce(np.ones(3))

    on_ranks(1, body)
