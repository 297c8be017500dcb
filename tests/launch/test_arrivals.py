"""Ranks that do not come to init(): when it is told, what is said, and when the job ends."""

from __future__ import annotations

import os

import pytest

from hvdlite import arrival
from hvdlite.launch import runner
from hvdlite.launch.arrivals import WARN, Arrivals
from hvdlite.launch.verdict import Record, judge


class Job:
    """A job of three ranks that have started on two hosts, at a time that is set by hand."""

    def __init__(self, limit: float | None) -> None:
        self.now = 100.0
        self.record = Record(3)
        for rank, host in enumerate(("a", "a", "b")):
            self.record.note(rank, "s", b"%d %s" % (70 + rank, host.encode()))
        self.arrivals = Arrivals(self.record, limit, lambda: self.now)

    def late_after(self, seconds: float):
        self.now += seconds
        return self.arrivals.late()


def test_as_long_as_nobody_waits_no_rank_is_late():
    assert Job(4).late_after(1e6) is None  # a program that needs long, or never calls init()
    job = Job(4)
    job.arrivals.note(0, b"+-")
    assert job.late_after(1e6) is None  # a world of its own


def test_the_missing_ranks_are_told_once_by_default_and_the_job_goes_on():
    job = Job(None)
    job.arrivals.note(0, b"+")
    assert job.late_after(WARN - 1) is None
    late = job.late_after(1)
    assert (late.final, late.rank) == (False, 1)
    assert late.words == (
        "ranks 1, 2 of 3 have not come to hvd.init(), and rank 0 waits there for 30 s: "
        "rank 1 still runs on a, process 71; rank 2 still runs on b, process 72"
    )
    assert job.late_after(1e6) is None
    job.arrivals.note(2, b"+")
    assert job.late_after(WARN - 1) is None  # the one that came gives the others time anew
    assert job.late_after(1).words.startswith("rank 1 of 3 has not come to hvd.init(), and ranks 0, 2 wait there")
    job.arrivals.note(1, b"+-")
    for rank in (0, 2):
        job.arrivals.note(rank, b"-")
    assert job.late_after(1e6) is None


def test_with_a_limit_the_job_ends_with_the_last_lines_of_a_missing_rank():
    job = Job(4)
    job.arrivals.note(2, b"+")
    job.arrivals.note(0, b"+")
    assert job.late_after(3.9) is None
    late = job.late_after(0.1)
    assert (late.final, late.rank) == (True, 1)
    job.record.late = late.words, late.rank
    verdict = judge(job.record, "mpirun", 143)
    assert (verdict.code, verdict.words, verdict.tail_of) == (1, late.words, 1)


@pytest.mark.parametrize("limit", [None, 60.0])
def test_a_rank_that_has_ended_cannot_come_and_ends_the_job_soon(limit):
    job = Job(limit)
    job.arrivals.note(0, b"+")
    job.record.note(2, "x", b"0 7.0 b")
    assert job.late_after(3) is None  # others may be about to say what is wrong
    late = job.late_after(5)
    assert (late.final, late.rank) == (True, 2)
    assert "hvd.init(), which every rank has to call, and rank 0 waits" in late.words
    assert late.words.endswith("rank 1 still runs on a, process 71; rank 2 on b ended with exit code 0 without it")


def test_a_rank_that_was_not_started_is_told():
    job = Job(4)
    del job.record.hosts[1]
    job.arrivals.note(0, b"+")
    job.arrivals.note(2, b"+")
    assert job.late_after(4).words.endswith(": rank 1 was not started")


def test_ranks_that_all_wait_are_not_connected():
    job = Job(4)
    for rank in range(3):
        job.arrivals.note(rank, b"+")
    late = job.late_after(4)
    assert late.final and late.rank is None
    assert late.words == (
        "ranks 0, 1, 2 of 3 came to hvd.init() and are not through after 4 s: MPI does not connect them: "
        "name the network that connects the hosts with --network-interfaces"
    )


@pytest.fixture
def pipe(monkeypatch):
    monkeypatch.delenv(runner._ARRIVAL, raising=False)
    ours, theirs = runner.pipe_for_arrival()
    environ = {arrival.VARIABLE: os.environ[runner._ARRIVAL]}
    monkeypatch.delenv(runner._ARRIVAL)
    yield ours, theirs, environ
    os.close(ours)


def test_a_rank_tells_that_it_comes_and_is_through_once(pipe):
    ours, _, environ = pipe
    with arrival.told(environ):
        assert os.read(ours, 9) == b"+"
    assert os.read(ours, 9) == b"-"
    with arrival.told(environ):  # after hvd.shutdown()
        pass
    assert os.read(ours, 9) == b""  # closed


def test_a_descriptor_that_is_another_file_by_now_is_left_alone(pipe):
    _, theirs, environ = pipe
    other, into = os.pipe()
    os.dup2(into, theirs)
    with arrival.told(environ):
        pass
    os.close(into)
    os.close(theirs)
    assert os.read(other, 9) == b""
    os.close(other)


def test_without_hvdrun_nothing_is_told():
    with arrival.told({}), arrival.told({arrival.VARIABLE: "x"}), arrival.told({arrival.VARIABLE: "99999:1"}):
        pass
