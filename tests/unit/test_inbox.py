"""What is submitted and not got back: names, duplicates, deferral, poison, closing, call sites."""

from __future__ import annotations

import inspect
import threading

import pytest

from hvdlite.engine.handle import Handle
from hvdlite.engine.inbox import Inbox, Submission, call_site
from hvdlite.errors import DuplicateNameError, ShutdownError
from hvdlite.messages import Kind, Request


def submission(name, kind=Kind.ALLREDUCE):
    return Submission(Request(kind, name), Handle(name))


def test_requests_are_handed_out_once_in_the_order_of_submission():
    inbox = Inbox()
    inbox.submit([submission("a")])
    inbox.poison([Request(Kind.ALLREDUCE, "p", problem="no")])
    inbox.submit([submission("b"), submission("c")])
    assert [request.name for request in inbox.drain()] == ["a", "p", "b", "c"]
    assert inbox.drain() == []
    assert list(inbox.in_flight) == ["a", "b", "c"]


def test_a_failed_try_is_announced_before_its_retry():
    inbox = Inbox()
    inbox.poison([Request(Kind.ALLREDUCE, "w", problem="no")])
    inbox.submit([submission("w")])
    assert [request.problem for request in inbox.drain()] == ["no", ""]


def test_a_refused_group_is_announced_in_one_piece():
    inbox = Inbox()
    inbox.poison([Request(Kind.ALLREDUCE, name, problem="no") for name in "ab"])
    assert [request.name for request in inbox.drain()] == ["a", "b"]


def test_a_finished_name_is_free_again():
    inbox = Inbox()
    first, second = submission("w"), submission("w")
    inbox.submit([first])
    inbox.finish("w", 7)
    assert first.handle.wait() == 7
    inbox.submit([second])
    inbox.fail("w", ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        second.handle.wait()
    assert inbox.get("w") is None


def test_failing_an_unknown_name_is_harmless():
    Inbox().fail("w", ValueError())


def test_a_duplicate_names_the_tensor_and_where_the_first_was_submitted():
    inbox = Inbox()
    inbox.submit([submission("w")])
    with pytest.raises(DuplicateNameError) as caught:
        inbox.submit([submission("w")])
    assert caught.value.tensor == "w"
    assert "same name as another tensor that is currently being processed" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize("names", ["xwy", "xyx"])
def test_a_group_with_a_duplicate_is_not_taken_in_at_all(names):
    inbox = Inbox()
    inbox.submit([submission("w")])
    inbox.drain()
    with pytest.raises(DuplicateNameError):
        inbox.submit([submission(name) for name in names])
    assert inbox.drain() == []
    assert list(inbox.in_flight) == ["w"]


def test_another_kind_under_the_same_name_waits_its_turn():
    inbox = Inbox()
    first, second = submission("w"), submission("w", Kind.BROADCAST)
    inbox.submit([first])
    inbox.submit([second])
    assert [request.kind for request in inbox.drain()] == [Kind.ALLREDUCE]
    with pytest.raises(DuplicateNameError):  # the waiting one counts, too
        inbox.submit([submission("w", Kind.BROADCAST)])
    inbox.finish("w", 1)
    assert [request.kind for request in inbox.drain()] == [Kind.BROADCAST]
    assert not second.handle.poll()
    inbox.finish("w", 2)
    assert (first.handle.wait(), second.handle.wait()) == (1, 2)


class Follows:
    """A Follower to which everything fits."""

    counter, broken = 0, False

    def accept(self, request):
        return True

    def accept_alone(self, request, values):
        return True


def test_what_is_alone_keeps_its_name():
    inbox, follower = Inbox(), Follows()
    inbox.follow(follower)
    request = Request(Kind.ALLREDUCE, "w")
    assert inbox.submit_alone(request, follower, None)
    with pytest.raises(DuplicateNameError, match=r"'w'.*another thread"):
        inbox.submit([submission("w")])
    later, other = submission("w", Kind.BROADCAST), submission("v")
    inbox.submit([later])
    inbox.submit([other])
    assert list(inbox.in_flight) == ["v"]
    inbox.leave_alone(None)
    assert list(inbox.in_flight) == ["v", "w"]
    assert inbox.get("w") is later
    assert not inbox.submit_alone(Request(Kind.ALLREDUCE, "u"), follower, None)  # not while others are in flight


def test_what_is_alone_may_go_on_like_any_other():
    inbox, follower = Inbox(), Follows()
    inbox.follow(follower)
    assert not inbox.submit_alone(Request(Kind.ALLREDUCE, "w"), Follows(), None)
    assert inbox.submit_alone(Request(Kind.ALLREDUCE, "w"), follower, None)
    assert not inbox.has_work
    one, later = submission("w"), submission("w", Kind.BROADCAST)
    inbox.submit([later])
    inbox.leave_alone(one)
    assert inbox.get("w") is one
    inbox.finish("w", 3)
    assert one.handle.wait() == 3
    assert inbox.get("w") is later


class OneName:
    """A follower of a schedule of nothing but `name`, a batch of its own."""

    def __init__(self, name, broken=False):
        self.name, self.broken, self.counter = name, broken, 0

    def fits(self, request):
        return request.name == self.name

    def accept(self, request):
        if self.broken or request.name != self.name:
            return False
        self.counter += 1
        return True

    def break_off(self):
        self.broken = True


def test_what_repeats_is_taken_in_and_told_to_nobody():
    inbox, follower = Inbox(), OneName("w")
    inbox.follow(follower)
    repeated = submission("w")
    assert inbox.submit_repeated(repeated, follower)
    assert inbox.attention
    assert inbox.drain() == []
    assert inbox.get("w") is repeated
    assert repeated.where.startswith(__file__)
    inbox.finish("w", 7)
    assert repeated.handle.wait() == 7


def test_what_does_not_fit_is_not_taken_in_and_the_schedule_goes_on():
    inbox, follower = Inbox(), OneName("w")
    assert not inbox.submit_repeated(submission("w"), follower)  # it is not the one that is followed
    inbox.follow(follower)
    assert not inbox.submit_repeated(submission("v"), follower)
    assert inbox.submit_repeated(submission("w"), follower)
    assert not inbox.submit_repeated(submission("w"), follower)  # its name is in flight
    assert not follower.broken
    assert follower.counter == 1
    inbox.finish("w")
    inbox.poison([Request(Kind.ALLREDUCE, "p", problem="no")])
    assert not inbox.submit_repeated(submission("w"), follower)  # not before what came before it
    assert list(inbox.in_flight) == []


def test_a_schedule_that_was_broken_off_in_between_takes_nothing_in():
    inbox, follower = Inbox(), OneName("w")
    inbox.follow(follower)
    follower.break_off()
    assert not inbox.submit_repeated(submission("w"), follower)
    assert list(inbox.in_flight) == []


def test_a_closed_inbox_takes_nothing_in_that_repeats():
    inbox, follower = Inbox(), OneName("w")
    inbox.follow(follower)
    inbox.close(lambda request: ShutdownError(request.name))
    assert not inbox.submit_repeated(submission("w"), follower)


def test_closing_fails_what_is_there_and_what_comes():
    inbox = Inbox()
    waiting = [submission("a"), submission("b"), submission("a", Kind.BROADCAST)]
    for one in waiting:
        inbox.submit([one])
    inbox.close(lambda request: ShutdownError(f"gone: {request.name}"))
    inbox.close(lambda _: ShutdownError("a second reason"))
    errors = []
    for one in waiting:
        with pytest.raises(ShutdownError, match=f"gone: {one.request.name}") as caught:
            one.handle.wait()
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 3  # each its own, so that tracebacks do not mix
    with pytest.raises(ShutdownError, match="gone: c"):
        inbox.submit([submission("c")])
    inbox.poison([Request(Kind.ALLREDUCE, "p", problem="no")])
    assert inbox.drain() == []
    assert inbox.in_flight == {}


def test_the_call_site_is_the_line_outside_hvdlite():
    inbox = Inbox()
    one = submission("w")
    line = inspect.currentframe().f_lineno + 1
    inbox.submit([one])
    assert one.site == (__file__, line)
    assert call_site()[0] == __file__


def test_many_threads_may_submit_at_once():
    inbox = Inbox()
    n, taken = 200, []
    drained = threading.Event()

    def drain():
        while len(taken) < 4 * n:
            taken.extend(inbox.drain())
        drained.set()

    def submit(who):
        for i in range(n):
            inbox.submit([submission(f"{who}.{i}")])

    threads = [threading.Thread(target=submit, args=(who,)) for who in range(4)]
    threads.append(threading.Thread(target=drain))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert drained.is_set()
    assert {request.name for request in taken} == {f"{who}.{i}" for who in range(4) for i in range(n)}
    for who in range(4):
        mine = [request.name for request in taken if request.name.startswith(f"{who}.")]
        assert mine == [f"{who}.{i}" for i in range(n)]
