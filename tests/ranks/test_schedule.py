"""The learned schedule: whatever the ranks do, the results are those of asking each time, and nothing hangs.

Each result is a sum whose terms say which rank, operation and step they come from, so a tensor that
meets another operation's, or another step's, shows up.
"""

import random
import threading
import time

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import lowlevel, runtime
from hvdlite.observe import log

SIZES = [1, 2, 3, 4, 7]
LAYOUTS = [
    pytest.param(None, id="shared memory"),
    pytest.param(lambda size: [f"h{r}" for r in range(size)], id="hosts"),
]


def value(rank, what, step):
    return float(1 + rank * 1000 + (hash_of(what) % 97) * 7 + step * 13)


def hash_of(what):
    return sum((i + 1) * ord(c) for i, c in enumerate(what))


def total(size, what, step):
    return sum(value(rank, what, step) for rank in range(size))


def follows():
    """Whether this rank runs a schedule now."""
    return runtime.current().engine_of(0)._negotiator.follower is not None


def one(rank, size, what, step, n=3, named=True):
    result = hvd.allreduce(np.full(n, value(rank, what, step)), op=hvd.Sum, name=what if named else None)
    assert result.tolist() == [total(size, what, step)] * n, (what, step)


def many(rank, size, names, step, order=None, n=3):
    handles = {}
    for what in order or names:
        array = np.full(n, value(rank, what, step))
        handles[what] = hvd.allreduce_async(array, op=hvd.Sum, name=what)
    for what in names:
        assert hvd.synchronize(handles[what]).tolist() == [total(size, what, step)] * n, (what, step)


def meeting(on_ranks, size, body, hosts=None):
    """Run body(rank, size) on all ranks. None leaves, which ends the schedule, before all have looked at theirs."""
    everyone = threading.Barrier(size)

    def play(rank):
        result = body(rank, size)
        everyone.wait(10)
        return result

    return on_ranks(size, play, hosts=hosts, timeout=20.0)


@pytest.fixture(params=LAYOUTS)
def run(request, on_ranks):
    def run(size, body):
        return meeting(on_ranks, size, body, request.param(size) if request.param else None)

    return run


@pytest.mark.parametrize("size", SIZES)
def test_a_repeated_name_is_scheduled(run, size):
    def body(rank, size):
        for step in range(20):
            one(rank, size, "x", step)
        return follows()

    assert run(size, body) == [True] * size


@pytest.mark.parametrize("size", SIZES)
def test_operations_without_names_are_scheduled(run, size):
    def body(rank, size):
        for step in range(20):
            one(rank, size, "x", step, n=3, named=False)
            one(rank, size, "y", step, n=2, named=False)
            hvd.barrier()
        return follows()

    assert run(size, body) == [True] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_training_step_is_scheduled_whatever_the_order_of_its_gradients(run, size):
    names = [f"g{i}" for i in range(12)]

    def body(rank, size):
        order = random.Random(rank)
        for step in range(15):
            many(rank, size, names, step, order.sample(names, len(names)))
            one(rank, size, "loss", step, named=False)
        return follows()

    assert run(size, body) == [True] * size


def test_all_kinds_of_operations_are_scheduled_together(run):
    def body(rank, size):
        for step in range(12):
            one(rank, size, "a", step)
            rows = np.full((rank + 1, 2), value(rank, "rows", step))
            gathered = hvd.allgather(rows, name="rows")
            expected = [[value(r, "rows", step)] * 2 for r in range(size) for _ in range(r + 1)]
            assert gathered.tolist() == expected
            assert hvd.allgather(rows).tolist() == expected
            root = hvd.broadcast(np.full(4, value(rank, "root", step)), size - 1)
            assert root.tolist() == [value(size - 1, "root", step)] * 4
            part = hvd.reducescatter(np.arange(2.0 * size) + rank, op=hvd.Sum, name="rs")
            assert part.tolist() == [size * i + size * (size - 1) / 2 for i in (2 * rank, 2 * rank + 1)]
            parts, _ = hvd.alltoall(np.arange(size) + 10.0 * rank + step, splits=[1] * size, name="to")
            assert parts.tolist() == [10.0 * r + rank + step for r in range(size)]
            hvd.barrier()
        return follows()

    assert run(3, body) == [True] * 3


def test_groups_are_scheduled(run):
    def body(rank, size):
        for step in range(12):
            arrays = [np.full(n, value(rank, f"t{n}", step)) for n in (1, 2, 3)]
            for n, result in enumerate(hvd.grouped_allreduce(arrays, name="group", op=hvd.Sum), 1):
                assert result.tolist() == [total(size, f"t{n}", step)] * n
        return follows()

    assert run(3, body) == [True] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_new_shape_is_negotiated_and_learned(run, size):
    def body(rank, size):
        for step in range(30):
            one(rank, size, "x", step, n=3 if step < 10 else 5 if step < 20 else 0)
        return follows()

    assert run(size, body) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_mismatch_within_a_schedule_raises_everywhere_and_the_next_call_works(run, size):
    def body(rank, size):
        for step in range(10):
            one(rank, size, "x", step)
        with pytest.raises(hvd.MismatchError, match="shape"):
            hvd.allreduce(np.ones(2 + rank), name="x")
        for step in range(10):
            one(rank, size, "x", step)
        return follows()

    assert run(size, body) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_wrong_arguments_within_a_schedule_raise_everywhere(run, size):
    def body(rank, size):
        for step in range(10):
            one(rank, size, "x", step)
        with pytest.raises((hvd.HorovodInternalError, ValueError)):
            hvd.allreduce(np.ones(3), name="x", op=hvd.Sum if rank else 77)
        for step in range(10):
            one(rank, size, "x", step)
        return follows()

    assert run(size, body) == [True] * size


@pytest.mark.parametrize("size", SIZES)
def test_frozen_layers_leave_the_schedule_and_form_a_new_one(run, size):
    def body(rank, size):
        names = [f"g{i}" for i in range(6)]
        for step in range(24):
            many(rank, size, names if step < 12 else names[2:], step)
        return follows()

    assert run(size, body) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_two_models_in_turns(run, size):
    def body(rank, size):
        for step in range(40):
            model = "ab"[step // 10 % 2]
            many(rank, size, [f"{model}{i}" for i in range(4)], step)
        for step in range(20):
            for model in "ab":
                many(rank, size, [f"{model}{i}" for i in range(4)], step)
        return follows()

    assert run(size, body) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_an_evaluation_between_steps(run, size):
    def body(rank, size):
        ends = []
        for epoch in range(4):
            for step in range(8):
                many(rank, size, ["g0", "g1", "g2"], step)
            ends.append(follows())
            one(rank, size, "accuracy", epoch)
            one(rank, size, "val", epoch, named=False)
        return ends

    assert run(size, body) == [[True] * 4] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_waits_before_it_has_submitted_the_batch_is_not_waited_for(run, size):
    # The others submit both and then wait; rank 0 waits in between, once all have learned them as one batch.
    def body(rank, size):
        for step in range(10):
            many(rank, size, ["a", "b"], step)
        for step in range(10):
            if rank == 0:
                one(rank, size, "a", step)
                one(rank, size, "b", step)
            else:
                many(rank, size, ["a", "b"], step)
        return follows()

    assert run(size, body) == [True] * size


def test_a_caller_that_only_polls_gets_its_result(on_ranks):
    def body(rank):
        for step in range(10):
            many(rank, 2, ["a", "b"], step)
        handle = hvd.allreduce_async(np.full(1, rank + 1.0), op=hvd.Sum, name="b")  # "a" does not come
        pause = threading.Event()
        while not handle.poll():
            pause.wait(0.001)
        return handle.wait().tolist()

    assert on_ranks(2, body) == [[3.0]] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_join_within_a_schedule(run, size):
    def body(rank, size):
        for step in range(10):
            one(rank, size, "x", step)
        if rank == 0:
            results = []
            for step in range(5):
                results.append(hvd.allreduce(np.full(3, float(step)), op=hvd.Sum, name="x").tolist())
            assert results == [[float(step)] * 3 for step in range(5)]
            last = hvd.join()
        else:
            last = hvd.join()
        for step in range(10):
            one(rank, size, "x", step)
        return last, follows()

    assert run(size, body) == [(0, True)] * size


def test_shutdown_within_a_schedule_ends_what_is_in_flight(run):
    def body(rank, size):
        for step in range(10):
            one(rank, size, "x", step)
        assert follows()
        if rank == 0:
            with pytest.raises(hvd.ShutdownError):
                hvd.allreduce(np.ones(3), name="x")
        hvd.shutdown()

    run(3, body)


def test_the_next_life_learns_anew(run):
    def body(rank, size):
        for _ in range(2):
            for step in range(10):
                one(rank, size, "x", step)
            hvd.allreduce(np.ones(1), name="end")
            hvd.shutdown()
            hvd.init()

    run(2, body)


def test_a_stall_within_a_schedule_is_explained(on_ranks, monkeypatch):
    monkeypatch.setenv("HVDLITE_STALL_WARNING", "0.3")
    texts, told = [], threading.Event()

    def warning(text, *arguments, **_):
        texts.append(text % arguments if arguments else text)
        told.set()

    monkeypatch.setattr(log.get_logger(), "warning", warning)

    def body(rank):
        for step in range(10):
            one(rank, 2, "x", step)
        assert follows()
        if rank == 1:
            assert told.wait(10)
        one(rank, 2, "x", 99)

    on_ranks(2, body)
    assert "allreduce of tensor 'x', float64[3], waits for rank 1." in texts[0]
    assert "rank 0: submitted it at" in texts[0]


def test_process_sets_have_schedules_of_their_own(on_ranks):
    def body(rank, size):
        even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
        mine = even if rank % 2 == 0 else odd
        members = mine.ranks
        for step in range(15):
            one(rank, 4, "x", step)
            result = hvd.allreduce(np.full(2, value(rank, "s", step)), op=hvd.Sum, name="x", process_set=mine)
            assert result.tolist() == [sum(value(r, "s", step) for r in members)] * 2
        assert follows()
        hvd.remove_process_set(even)
        for step in range(10):
            one(rank, 4, "x", step)
        return follows()

    assert meeting(on_ranks, 4, body) == [True] * 4


def test_threads_of_one_rank_share_a_schedule(on_ranks):
    def body(rank):
        transport, running = runtime.thread_transport(), runtime.current()
        failures = []

        def work(name):
            with runtime.as_rank(transport):
                runtime.set_current(running)
                try:
                    for step in range(60):
                        one(rank, 2, name, step)
                except BaseException as error:
                    failures.append(error)
                finally:
                    runtime.set_current(None)

        threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return failures

    assert on_ranks(2, body) == [[]] * 2


def test_the_schedule_can_be_turned_off(on_ranks, monkeypatch):
    monkeypatch.setenv("HVDLITE_LEARN_SCHEDULE", "0")

    def body(rank):
        for step in range(10):
            one(rank, 2, "x", step)
        return follows()

    assert on_ranks(2, body) == [False, False]


def random_program(dice):
    """Return steps of two models, now and then with something else in between."""
    program = []
    for _ in range(dice.randint(6, 14)):
        model = dice.choice("mmn")
        for _ in range(dice.randint(1, 7)):
            program.append(("step", model))
            if dice.random() < 0.1:
                program.append((dice.choice(["odd", "unnamed", "barrier", "shape", "wrong", "gather"]), model))
    return program


def pause(dice):
    if dice.random() < 0.05:
        time.sleep(dice.random() * 0.004)  # what a rank does that is late


def random_step(dice, rank, size, names, step):
    """Submit `names` in any order, with pauses, wait in any order, and for some before the others are submitted."""
    handles = {}
    expected = {name: [total(size, name, step)] * 3 for name in names}
    for name in dice.sample(names, len(names)):
        pause(dice)
        handles[name] = hvd.allreduce_async(np.full(3, value(rank, name, step)), op=hvd.Sum, name=name)
        if dice.random() < 0.02 and size == 2 and rank:
            assert handles[name].wait().tolist() == expected[name]
    for name in dice.sample(names, len(names)):
        pause(dice)
        assert handles[name].wait().tolist() == expected[name]


def something_else(what, rank, size, name, step):
    if what == "odd":
        one(rank, size, f"odd{step}", step)
    elif what == "unnamed":
        one(rank, size, "unnamed", step, named=False)
    elif what == "barrier":
        hvd.barrier()
    elif what == "shape":
        one(rank, size, name, step, n=5)
    elif what == "wrong":
        with pytest.raises(hvd.MismatchError):
            hvd.allreduce(np.ones(1 + rank), name=name)
    else:
        rows = hvd.allgather(np.full(rank, value(rank, "rows", step)), name="rows")
        assert rows.tolist() == [value(r, "rows", step) for r in range(size) for _ in range(r)]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_give_what_asking_each_time_gives(run, seed):
    dice = random.Random(seed)
    size = dice.choice([2, 2, 3, 4, 7])
    names = {model: [f"{model}{i}" for i in range(dice.randint(1, 6))] for model in "mn"}
    program = random_program(dice)

    def body(rank, size):
        mine = random.Random(1000 * seed + rank)
        for step, (what, model) in enumerate(program):
            if what == "step":
                random_step(mine, rank, size, names[model], step)
            else:
                something_else(what, rank, size, names[model][0], step)
        return True

    assert run(size, body) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_that_completes_at_once_is_learned_although_windows_began_amid_it(on_ranks, size):
    def together(rank, names, step):
        arrays = [np.full(3, value(rank, what, step)) for what in names]
        items = [lowlevel.Item(array, np.empty(3)) for array in arrays]
        handles = lowlevel.start(
            lowlevel.Kind.ALLREDUCE, names, items, hvd.global_process_set, op=hvd.Sum, grouped=False
        )
        for what, item, handle in zip(names, items, handles, strict=True):
            handle.wait()
            assert item.target.tolist() == [total(size, what, step)] * 3, (what, step)

    def body(rank, size):
        followed = []
        for step in range(30):
            if step == 10:  # ends the schedule, and the next window begins with the last of a step
                together(rank, ["c"], 100)
            one(rank, size, "nameless", step, named=False)
            together(rank, ["a", "b", "c"], step)
            followed.append(follows())
        return followed[9], followed[10], followed[-1]

    assert meeting(on_ranks, size, body) == [(True, False, True)] * size
