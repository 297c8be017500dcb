"""The watchdog: when it warns and when it ends the job, and that it stays silent while there is progress."""

from __future__ import annotations

import math

import pytest

from hvdlite.engine.watchdog import UnderWay, Watchdog


class Engine:
    """Has something in flight, or not, as the test says."""

    found: UnderWay | None = None

    def under_way(self):
        return self.found


class Watched:
    def __init__(self, *engines: Engine, shutdown: float = 30.0) -> None:
        self.warned, self.ended = [], []
        self.dog = Watchdog(10.0, shutdown, lambda: engines, self.warned.append, self.ended.append)

    def look(self, *times: float) -> tuple[int, int]:
        for now in times:
            self.dog.look(now)
        return len(self.warned), len(self.ended)


def under_way(progress: float, explained: float = -math.inf) -> UnderWay:
    return UnderWay("allreduce of tensor 'w'", (progress, 0.0), explained)


def test_an_operation_without_progress_is_told_once_and_then_ends_the_job():
    engine = Engine()
    watched = Watched(engine)
    engine.found = under_way(1)
    assert watched.look(100, 105, 110) == (0, 0)
    assert watched.look(111, 115, 130) == (1, 0)
    assert watched.warned[0] == "allreduce of tensor 'w' has been under way for 11 s, and some rank does not answer"
    assert watched.look(131) == (1, 1)


def test_without_a_limit_the_job_is_never_ended():
    engine = Engine()
    engine.found = under_way(1)
    assert Watched(engine, shutdown=0).look(0, 1e6, 2e6) == (1, 0)


@pytest.mark.parametrize("gap", [None, under_way(2)])
def test_progress_gives_time_anew(gap):
    engine = Engine()
    watched = Watched(engine)
    engine.found = under_way(1)
    watched.look(0, 9)
    engine.found = gap
    watched.look(9.5)
    engine.found = under_way(3)
    assert watched.look(10, 19) == (0, 0)
    assert watched.look(21) == (1, 0)


def test_what_the_stall_watch_explains_is_left_to_it():
    engine = Engine()
    watched = Watched(engine)
    for now in range(0, 1000, 9):
        engine.found = under_way(1, explained=float(now))
        assert watched.look(now) == (0, 0)
    assert watched.look(1010) == (1, 0)


def test_each_engine_is_seen_by_itself():
    stuck, busy = Engine(), Engine()
    watched = Watched(stuck, busy)
    stuck.found = under_way(1)
    for now in range(32):
        busy.found = under_way(now)
        watched.look(now)
    assert (len(watched.warned), len(watched.ended)) == (1, 1)
