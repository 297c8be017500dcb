"""The short way of a synchronous allreduce of arrays: values shown together with the numbers, or not, as ranks please.

Each result is a sum whose terms say which rank and step they come from. What is wrong in one rank's cell, or read too
late, shows up.
"""

import random
import threading
import time

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.collectives.reference import reduce_in_rank_order
from hvdlite.engine.cycle import Cycle
from hvdlite.engine.engine import Engine
from hvdlite.engine.short_way import ShortWay
from hvdlite.kernels import NO_FINISH

SIZES = [2, 3, 4, 7]


@pytest.fixture
def seen(monkeypatch):
    """What happened, by name: how often."""
    counts = {"shown": 0, "not shown": 0, "late": 0, "entered": 0, "at once": 0}
    reduce_one, run_late, enter, at_once = (
        Cycle.allreduce_one, ShortWay.run_late, ShortWay.enter, Engine.allreduce_at_once,
    )  # fmt: skip

    def watched_one(self, response, how, source, target, shown, home=None):
        counts["not shown" if shown is None else "shown"] += 1
        reduce_one(self, response, how, source, target, shown, home)

    def watched_late(self, response, follower):
        done = run_late(self, response, follower)
        counts["late"] += done
        return done

    def watched_enter(self, *arguments):
        how = enter(self, *arguments)
        counts["entered"] += how is not None
        return how

    def watched_at_once(self, *arguments):
        done = at_once(self, *arguments)
        counts["at once"] += done is True
        return done

    monkeypatch.setattr(Cycle, "allreduce_one", watched_one)
    monkeypatch.setattr(ShortWay, "run_late", watched_late)
    monkeypatch.setattr(ShortWay, "enter", watched_enter)
    monkeypatch.setattr(Engine, "allreduce_at_once", watched_at_once)
    return counts


def meeting(on_ranks, size, body):
    """Run body(rank) on all ranks. None leaves before all are through."""
    everyone = threading.Barrier(size)

    def play(rank):
        body(rank)
        everyone.wait(10)

    on_ranks(size, play, timeout=30.0)


def mine(rank, step, n=5, dtype="float64"):
    return ((np.arange(n) * 7 + 100 * rank + 13 * step) % 50).astype(dtype)


def total(size, step, n=5):
    return sum(mine(rank, step, n) for rank in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_small_arrays_are_shown(on_ranks, seen, size):
    def body(rank):
        for step in range(40):
            kept = mine(rank, step)
            given = kept.copy()
            result = hvd.allreduce(given, name="x", op=hvd.Sum)
            assert result.tolist() == total(size, step).tolist()
            assert given.tolist() == kept.tolist()
            same = hvd.allreduce_(given, op=hvd.Sum)
            assert same is given
            assert given.tolist() == total(size, step).tolist()

    meeting(on_ranks, size, body)
    assert seen["shown"] > 10 * size
    assert seen["at once"] > 0


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float32", "complex64"])
@pytest.mark.parametrize("n", [0, 1, 1001])
def test_dtypes_and_lengths(on_ranks, seen, dtype, n):
    def body(rank):
        for step in range(12):
            given = [mine(r, step, n, dtype) for r in range(3)]
            result = hvd.allreduce(given[rank].reshape(1, n), name="x", op=hvd.Sum)
            assert (result.dtype, result.shape) == (np.dtype(dtype), (1, n))
            assert result.tobytes() == reduce_in_rank_order(given, hvd.Sum, 1.0, NO_FINISH).tobytes()

    meeting(on_ranks, 3, body)
    assert (seen["shown"] > 0) == (n > 0)


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_too_large_to_be_shown_is_reduced_as_elsewhere(on_ranks, seen, size):
    most = 512 * 1024 // (size - 1) // 8

    def body(rank):
        for n in (most, most + 1):
            before = dict(seen)
            for step in range(12):
                result = hvd.allreduce(mine(rank, step, n), name=f"x{n}", op=hvd.Average)
                np.testing.assert_allclose(result, total(size, step, n) / size, rtol=1e-15)
            hvd.barrier()
            if n == most:
                assert seen["shown"] > before["shown"]
            else:
                assert seen["not shown"] > before["not shown"]

    meeting(on_ranks, size, body)


@pytest.mark.parametrize("size", SIZES)
def test_late_ranks_find_what_was_shown(on_ranks, seen, size):
    def body(rank):
        for step in range(24):
            if step > 8 and rank == step % size:
                time.sleep(0.01)
            assert hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum).tolist() == total(size, step).tolist()

    meeting(on_ranks, size, body)
    assert seen["late"] > 0


@pytest.mark.parametrize("size", SIZES)
def test_some_ranks_wait_and_others_do_not(on_ranks, seen, size):
    """Then not all show their values, and all must notice."""

    def body(rank):
        dice = random.Random(rank)
        for step in range(60):
            if step > 5 and dice.random() < 0.3:
                handle = hvd.allreduce_async(mine(rank, step), name="x", op=hvd.Sum)
                if dice.random() < 0.5:
                    time.sleep(0.002)
                result = handle.wait()
            else:
                result = hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum)
            assert result.tolist() == total(size, step).tolist(), step

    meeting(on_ranks, size, body)
    assert seen["shown"] > 0


@pytest.mark.parametrize("seed", range(8))
def test_schedules_that_come_and_go(on_ranks, seen, seed):
    """Ranks lag, run ahead by asynchronous calls, and leave the schedule: no cell may be read or written too late."""
    dice = random.Random(seed)
    size = dice.choice(SIZES)
    odd = {step for step in range(120) if dice.random() < 0.07}

    def body(rank):
        own = random.Random(1000 * seed + rank)
        for step in range(120):
            names = ["a", "b", None][: 1 + seed % 3]
            for k, name in enumerate(names):
                if own.random() < 0.02:
                    time.sleep(0.003)
                result = hvd.allreduce(mine(rank, 3 * step + k), name=name, op=hvd.Sum)
                assert result.tolist() == total(size, 3 * step + k).tolist(), (step, name)
            if step in odd:
                if seed % 2:
                    ahead = [hvd.allreduce_async(mine(rank, step + k), name=f"c{k}", op=hvd.Sum) for k in range(2)]
                    assert [h.wait().tolist() for h in ahead] == [total(size, step + k).tolist() for k in range(2)]
                else:
                    hvd.broadcast(np.zeros(3), root_rank=step % size, name="odd")

    meeting(on_ranks, size, body)
    assert seen["shown"] > 0


def test_another_thread_may_use_other_names_meanwhile_and_this_one_for_another_kind(on_ranks):
    def body(rank):
        for step in range(10):
            hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum)
        if rank == 0:
            entered = threading.Event()
            engine = runtime.current().engine_of(0)
            on_accepted = engine._inbox._on_accepted

            def accepted(request):
                on_accepted(request)
                entered.set()

            engine._inbox._on_accepted = accepted
            transport = runtime.thread_transport()
            results = []

            def first():
                runtime._thread.transport, runtime._thread.runtime = transport, here
                results.append(hvd.allreduce(mine(rank, 10), name="x", op=hvd.Sum).tolist())

            here = runtime.current()
            thread = threading.Thread(target=first)
            thread.start()
            assert entered.wait(10)
            other = hvd.allreduce_async(mine(rank, 12), name="y", op=hvd.Sum)
            again = hvd.broadcast_async(np.full(2, 5.0), root_rank=0, name="x")
            thread.join(10)
            assert results == [total(2, 10).tolist()]
            assert other.wait().tolist() == total(2, 12).tolist()
            assert again.wait().tolist() == [5.0, 5.0]
        else:
            time.sleep(0.3)
            assert hvd.allreduce(mine(rank, 10), name="x", op=hvd.Sum).tolist() == total(2, 10).tolist()
            assert hvd.allreduce(mine(rank, 12), name="y", op=hvd.Sum).tolist() == total(2, 12).tolist()
            assert hvd.broadcast(np.zeros(2), root_rank=0, name="x").tolist() == [5.0, 5.0]
        for step in range(10):
            assert hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum).tolist() == total(2, step).tolist()

    meeting(on_ranks, 2, body)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_the_middle_ends_the_engine_and_is_raised(on_ranks, monkeypatch, error):
    broken = threading.Event()
    reduce_one = Cycle.allreduce_one

    def failing(self, *arguments):
        if broken.is_set():
            raise error("the memory is gone")
        reduce_one(self, *arguments)

    monkeypatch.setattr(Cycle, "allreduce_one", failing)

    def body(rank):
        for step in range(10):
            hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum)
        broken.set()
        with pytest.raises((hvd.HorovodInternalError, KeyboardInterrupt), match="the memory is gone") as caught:
            hvd.allreduce(mine(rank, 0), name="x", op=hvd.Sum)
        assert isinstance(caught.value, KeyboardInterrupt) == (error is KeyboardInterrupt)
        with pytest.raises(hvd.HorovodInternalError, match="'y'.*the memory is gone"):
            hvd.allreduce(mine(rank, 0), name="y", op=hvd.Sum)

    on_ranks(1, body)


def test_waiting_counts_as_waiting(on_ranks):
    def body(rank):
        for step in range(10):
            hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum)
        before = hvd.metrics()
        for step in range(20):
            hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum)
        after = hvd.metrics()
        assert after["waits"] - before["waits"] >= 20
        done = [m["operations"]["allreduce"] for m in (before, after)]
        assert done[1]["batches"] - done[0]["batches"] == 20
        hidden = done[1]["hidden_seconds"] - done[0]["hidden_seconds"]
        assert hidden <= 0.5 * (done[1]["seconds"] - done[0]["seconds"])

    meeting(on_ranks, 2, body)


class Held:
    """Holds rank 1 back between the news that all ranks have come with "x" and its look at their values."""

    def __init__(self, monkeypatch):
        run, run_late, enter, reduce_one = ShortWay.run, ShortWay.run_late, ShortWay.enter, Cycle.allreduce_one
        self.on, self.x_waits, self.submitted, self.ahead = (threading.Event() for _ in range(4))

        def watched_run(way, *arguments):
            done = run(way, *arguments)
            if self.on.is_set() and not done:
                self.x_waits.set()
            return done

        def watched_late(way, response, follower):
            if self.on.is_set() and response.name == "x" and way._inbox.get("x").source.host()[0] == 11:
                assert self.ahead.wait(10)
            return run_late(way, response, follower)

        def watched_enter(way, request, source, follower):
            how = enter(way, request, source, follower)
            if how is not None and source[0] == 20:  # rank 0 is in the next turn
                self.ahead.set()
            return how

        def watched_one(cycle, response, how, source, target, shown, home=None):
            if self.on.is_set() and shown is None:  # rank 0 waits for rank 1
                self.ahead.set()
            reduce_one(cycle, response, how, source, target, shown, home)

        monkeypatch.setattr(ShortWay, "run", watched_run)
        monkeypatch.setattr(ShortWay, "run_late", watched_late)
        monkeypatch.setattr(ShortWay, "enter", watched_enter)
        monkeypatch.setattr(Cycle, "allreduce_one", watched_one)


@pytest.mark.parametrize("between", ["broadcast", "empty"])
def test_no_cell_is_written_again_while_another_thread_has_run_ahead(on_ranks, monkeypatch, between):
    """Between two turns of "x" comes what one rank may run alone, submitted by the other before it has read "x"."""
    held, meet = Held(monkeypatch), threading.Barrier(2)

    def start_between():
        if between == "empty":
            return hvd.allreduce_async(np.zeros(0), name="b", op=hvd.Sum)
        return hvd.broadcast_async(np.arange(3.0), root_rank=0, name="b")

    def submit_ahead(transport, here):
        runtime._thread.transport, runtime._thread.runtime = transport, here
        assert held.x_waits.wait(10)
        handle = start_between()
        held.submitted.set()
        handle.wait()

    def reduce(value):
        return hvd.allreduce(np.full(4, value), name="x", op=hvd.Sum).tolist()

    def body(rank):
        for step in range(10):
            reduce(float(step))
            start_between().wait()
        meet.wait(10)
        held.on.set()
        if rank == 1:
            here = runtime.thread_transport(), runtime.current()
            thread = threading.Thread(target=submit_ahead, args=here)
            thread.start()
            results = [reduce(11.0)]
            thread.join(10)
        else:
            assert held.submitted.wait(10)
            results = [reduce(10.0)]
            start_between().wait()
        assert [*results, reduce(20.0 + rank)] == [[21.0] * 4, [41.0] * 4]

    meeting(on_ranks, 2, body)
