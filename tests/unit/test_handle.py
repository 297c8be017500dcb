"""The caller's end of an operation: poll, wait, time limits, several waiters."""

from __future__ import annotations

import threading

import pytest

from hvdlite.engine import handle as handle_module
from hvdlite.engine.handle import GroupHandle, Handle
from hvdlite.observe.instrument import WaitClock


def done(name="w", value=None, convert=None):
    handle = Handle(name, convert)
    handle.finish(value)
    return handle


def test_a_handle_is_done_once_it_is_finished():
    handle = Handle("w")
    assert not handle.poll()
    handle.finish(7)
    assert handle.poll()
    assert handle.wait() == 7
    assert handle.poll()


def test_waiting_twice_gives_the_same_object():
    handle = done(value=[1], convert=lambda raw: [*raw, 2])
    first = handle.wait()
    assert first == [1, 2]
    assert handle.wait() is first


def test_none_is_a_result():
    assert done(convert=lambda raw: raw).wait() is None


def test_an_error_is_raised_as_often_as_one_waits():
    handle = Handle("w")
    handle.fail(ValueError("no"))
    assert handle.poll()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            handle.wait()


def test_a_time_limit_names_the_tensor_and_leaves_the_operation_alone():
    handle = Handle("layer1.weight")
    with pytest.raises(TimeoutError, match=r"layer1.weight.*0.01 s"):
        handle.wait(0.01)
    with pytest.raises(TimeoutError):
        handle.wait(0)
    handle.finish(3)
    assert handle.wait(0) == 3


def test_all_waiters_get_the_one_result_of_one_conversion():
    calls = []
    entered, go_on = threading.Event(), threading.Event()

    def convert(raw):
        calls.append(raw)
        entered.set()
        assert go_on.wait(10)
        return [raw]

    handle = Handle("w", convert)
    results = []
    waiters = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    handle.finish(5)
    assert entered.wait(10)  # one converts, the others come meanwhile
    go_on.set()
    for waiter in waiters:
        waiter.join(10)
    assert calls == [5]
    assert results == [[5]] * 3
    assert results[0] is results[1] is results[2]


def test_a_handle_stays_done_while_another_thread_has_its_lock():
    # The thread that drives the engine for this handle asks poll(); a False would let it sleep on.
    entered, go_on = threading.Event(), threading.Event()

    def convert(raw):
        entered.set()
        assert go_on.wait(10)
        return raw

    handle = done(value=5, convert=convert)
    waiter = threading.Thread(target=handle.wait)
    waiter.start()
    assert entered.wait(10)
    assert handle.poll()
    go_on.set()
    waiter.join(10)
    assert handle.wait() == 5


class Clockwork:
    """A driver that spends all the time that it is given, on a clock of its own."""

    waits = WaitClock()

    def __init__(self):
        self.now, self.limits, self.alerts = 0.0, [], 0

    def monotonic(self):
        return self.now

    def drive(self, done, timeout):
        self.limits.append(timeout)
        self.now += timeout

    def alert(self):
        self.alerts += 1


def test_the_waiting_thread_is_lent_to_the_driver_within_the_time_limit(monkeypatch):
    driver = Clockwork()
    monkeypatch.setattr(handle_module, "time", driver)
    handle = Handle("w", driver=driver)
    with pytest.raises(TimeoutError, match="1000 s"):
        handle.wait(1000)
    assert driver.limits == [1000]
    handle.finish(3)
    assert handle.wait() == 3
    assert driver.limits == [1000]  # a finished handle needs no driver
    assert driver.alerts == 0


def test_a_conversion_that_fails_fails_the_same_way_each_time():
    calls = []

    def convert(raw):
        calls.append(raw)
        raise OverflowError("too much")

    handle = done(value=1, convert=convert)
    for _ in range(2):
        with pytest.raises(OverflowError):
            handle.wait()
    assert calls == [1]
    assert handle.poll()


def test_a_group_returns_the_list_of_results():
    group = GroupHandle([done(value=1), done(value=2)])
    assert group.poll()
    assert group.wait() == [1, 2]
    assert group.wait() == [1, 2]


def test_a_group_is_done_when_its_last_member_is():
    late = Handle("b")
    group = GroupHandle([done(value=1), late])
    assert not group.poll()
    late.finish(2)
    assert group.poll()


def test_a_group_raises_its_first_error_but_waits_for_all():
    handles = [Handle(name) for name in "abc"]
    group = GroupHandle(handles)
    handles[0].finish(1)
    handles[1].fail(ValueError("b is wrong"))
    ended = threading.Event()

    def wait():
        with pytest.raises(ValueError, match="b is wrong"):
            group.wait()
        ended.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not ended.wait(0.05)
    handles[2].fail(KeyError("c is wrong, too"))
    waiter.join(10)
    assert ended.is_set()


def test_the_time_limit_of_a_group_is_for_all_of_it():
    waited = []

    class Slow(Handle):
        def wait(self, timeout=None):
            waited.append(timeout)
            return super().wait(timeout)

    group = GroupHandle([Slow(name) for name in "abcde"])
    with pytest.raises(TimeoutError, match="'a'"):
        group.wait(0.02)
    assert sum(waited) < 0.05


def test_a_group_hands_its_list_to_the_converter():
    assert GroupHandle([done(value=1), done(value=2)], convert=tuple).wait() == (1, 2)
