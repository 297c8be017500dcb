"""hvd.elastic.run and ObjectState, on threads that play ranks."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.elastic import HostsUpdatedInterrupt, ObjectState, State, run


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_begin_with_the_state_of_rank_0(ranks, size):
    @run
    def train(state, more):
        return state.epoch, state.log, more

    assert ranks(size, lambda rank: train(ObjectState(epoch=rank, log=["rank", rank]), more=rank)) == [
        (0, ["rank", 0], rank) for rank in range(size)
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_after_a_failure_it_goes_on_from_the_last_commit(ranks, size):
    """A shape that differs on one rank fails on all, once."""

    def body(rank):
        seen = []
        failed = []

        @run
        def train(state):
            while state.step < 6:
                if state.step == 4 and not failed:
                    failed.append(state.step)
                    state.log.append("lost")
                    hvd.allreduce(np.zeros(3 + rank), name="different")
                    raise hvd.HorovodInternalError("for one rank")
                total = hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum, name="same")
                state.step += 1
                state.log.append(float(total[0]))
                seen.append(state.step)
                if state.step % 2 == 1:
                    state.commit()
            return state.log

        state = ObjectState(step=0, log=[])
        calls = []
        state.register_reset_callbacks([lambda: calls.append(hvd.size()), lambda: calls.append("second")])
        log = train(state)
        return log, seen, calls

    total = size * (size + 1) / 2
    expected = ([total] * 6, [1, 2, 3, 4, 4, 5, 6], [size, "second"])
    assert ranks(size, body) == [expected] * size


def test_one_ranks_failure_brings_all_back_to_the_commit(ranks):
    def body(rank):
        failed = []

        @run
        def train(state):
            while state.step < 4:
                hvd.allreduce(np.ones(1), name=f"step{state.step}")
                state.step += 1
                if state.step == 2:
                    state.commit()
                if state.step == 3 and rank == 1 and not failed:
                    failed.append(True)
                    raise hvd.HorovodInternalError("only rank 1 sees it")
            return state.step, len(failed)

        return train(ObjectState(step=0))

    assert ranks(3, body) == [(4, 0), (4, 1), (4, 0)]


def test_the_third_failure_without_a_commit_raises_the_first(ranks):
    def body(rank):
        calls = []

        @run
        def train(state):
            calls.append(state.step)
            hvd.barrier()
            if len(calls) == 2:
                state.step = 5
                state.commit()
            raise hvd.HorovodInternalError(f"failure {len(calls)}")

        with pytest.raises(hvd.HorovodInternalError, match="^failure 2$"):
            train(ObjectState(step=0))
        return calls

    assert ranks(2, body) == [[0, 0, 5, 5]] * 2


def test_other_exceptions_pass_and_results_come_back(ranks):
    def body(rank):
        @run
        def train(state):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            train(ObjectState(step=0))

    ranks(2, body)


def test_news_of_hosts_on_rank_0_interrupt_all_ranks(ranks):
    def body(rank):
        updates = []

        @run
        def train(state):
            if not updates:
                updates.append(1)
                state.value = rank + 10
                if rank == 0:
                    state.on_hosts_updated(7.0, 2)
                state.check_host_updates()
                raise AssertionError("not reached")
            state.check_host_updates()  # told once
            return state.value

        return train(ObjectState(value=0))

    assert ranks(3, body) == [10, 10, 10]  # nothing was lost, and all have what rank 0 had


def test_removed_hosts_need_no_sync(ranks):
    def body(rank):
        state = ObjectState(value=rank)
        if rank == 0:
            state.on_hosts_updated(1.0, 1)
            state.on_hosts_updated(2.0, 1)
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.commit()
        return caught.value.skip_sync, caught.value.is_written

    assert ranks(2, body) == [(True, True)] * 2


def test_news_on_another_rank_do_not_count(ranks):
    def body(rank):
        state = ObjectState(value=rank)
        if rank == 1:
            state.on_hosts_updated(1.0, 2)
        state.commit()
        return state.n_commits

    assert ranks(2, body) == [1, 1]


def test_what_was_saved_does_not_change_with_the_attribute(ranks):
    def body(rank):
        state = ObjectState(history=[1], function=print)
        state.history.append(2)
        state.restore()
        first = list(state.history)
        state.history.append(3)
        state.restore()
        return first, state.history, state.function is print

    assert ranks(1, body) == [([1], [1], True)]


def test_a_name_of_a_method_is_refused():
    with pytest.raises(hvd.InvalidRequestError, match=r"ObjectState\(commit=\.\.\.\): 'commit' is a method"):
        ObjectState(commit=3)


def test_the_base_leaves_what_to_remember_to_subclasses():
    state = State(lambda value: value, lambda: 0)
    for call in (state.save, state.restore, state.sync):
        with pytest.raises(NotImplementedError):
            call()
    state.on_reset()
    state.check_host_updates()


def test_without_init_it_says_so():
    with pytest.raises(hvd.NotInitializedError, match=r"use hvd\.init\(\) first"):
        run(lambda state: None)(State())


def test_the_next_start_goes_on_from_the_commit_on_disk(ranks, folder):
    def start(stop):
        def body(rank):
            @run
            def train(state):
                begun = state.step
                while state.step < 10:
                    state.step += 1
                    state.log.append(hvd.size())
                    if state.step % 3 == 0:
                        state.commit()
                    if state.step == stop:
                        raise KeyError("the job ends here")
                return begun, state.log

            return train(ObjectState(step=0, log=[]))

        return body

    with pytest.raises(KeyError):
        ranks(3, start(8))
    assert ranks(2, start(None)) == [(6, [3] * 6 + [2] * 4)] * 2


def test_news_from_hvdrun_make_the_ranks_leave_with_all_they_have_done(ranks, folder):
    def body(rank):
        @run
        def train(state):
            state.step += 1
            if rank == 0:
                (folder / "hosts-updated").write_text("123.5 2\n")
            hvd.barrier()
            state.check_host_updates()

        with pytest.raises(SystemExit) as left:
            train(ObjectState(step=40))
        return left.value.code, hvd.is_initialized()

    folder.mkdir()
    assert ranks(2, body) == [(0, False)] * 2
    (folder / "hosts-updated").unlink()
    assert ranks(3, lambda rank: run(lambda state: state.step)(ObjectState(step=0))) == [0] * 3  # another function
    assert sorted(entry.name for entry in folder.iterdir()) == ["commit-1"]


def test_each_of_several_trainings_goes_on_from_its_own_commit(ranks, folder):
    def start(stop):
        def body(rank):
            @run
            def train(state):
                begun = state.step
                while state.step < 4:
                    state.step += 1
                    state.commit()
                    if (state.fold, state.step) == stop:
                        raise KeyError("the job ends here")
                return begun

            return [train(ObjectState(fold=fold, step=0)) for fold in range(3)]

        return body

    with pytest.raises(KeyError):
        ranks(2, start((1, 2)))
    assert ranks(2, start(None)) == [[4, 2, 0]] * 2


def test_what_only_a_new_start_mends_is_raised(ranks, folder):
    def body(rank):
        calls = []

        @run
        def train(state):
            calls.append(1)
            raise hvd.StallError("rank 1 is stuck")

        with pytest.raises(hvd.StallError):
            train(ObjectState())
        return len(calls)

    assert ranks(2, body) == [1, 1]


def test_what_cannot_be_pickled_is_told_to_all_ranks(ranks, folder):
    def body(rank):
        @run
        def train(state):
            with pytest.raises(
                hvd.InvalidRequestError, match=r"^rank 0: elastic commit: .*cannot be pickled: TypeError"
            ):
                state.commit()
            state.lock = None
            state.commit()
            return state.n_commits

        state = ObjectState(lock=None)
        state.sync = lambda: setattr(state, "lock", threading.Lock() if rank == 0 else None)
        return train(state)

    assert ranks(3, body) == [2, 2, 2]


def test_a_state_that_cannot_be_carried_over_is_told(ranks, folder, capsys):
    class Mine(State):
        def save(self): ...
        def restore(self): ...
        def sync(self): ...

    ranks(2, lambda rank: run(lambda state: [state.commit(), state.commit()])(Mine()))
    told = "Mine has no to_commit(), so that a new start of the job begins at the beginning"
    assert capsys.readouterr().err.count(told) == 1
