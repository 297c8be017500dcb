"""The clock of waiting, with several callers, and the line about a whole job."""

from __future__ import annotations

import pytest

from hvdlite.observe import instrument
from hvdlite.observe.instrument import WaitClock
from hvdlite.observe.metrics import Metrics, summary


@pytest.fixture
def clock(monkeypatch):
    """Moments to come, in order."""
    moments = []
    monkeypatch.setattr(instrument, "perf_counter", lambda: moments.pop(0))
    return moments


def test_the_time_counts_once_however_many_callers_wait(clock):
    heard, waits = [], WaitClock()
    waits.on_waited = lambda since, until: heard.append((since, until))
    clock += [10.0, 14.0, 20.0, 21.0]
    waits.begin()
    waits.begin()
    assert waits.seconds(11.0) == 1.0
    waits.end()
    assert waits.seconds(13.0) == 3.0
    waits.end()
    assert waits.seconds(19.0) == 4.0
    waits.begin()
    assert waits.seconds(19.9) == 4.0  # a moment before, read by another thread
    assert waits.seconds(20.5) == 4.5
    waits.end()
    assert waits.seconds(30.0) == 5.0
    assert heard == [(10.0, 14.0), (20.0, 21.0)]
    assert waits.count == 2


def rank(waiting, busy=2.0, hidden=0.75, n=3):
    kind = {"batches": n, "tensors": 4 * n, "bytes": 2_500_000 * n, "seconds": busy, "hidden_seconds": busy * hidden}
    barrier = {"batches": 9, "tensors": 9, "bytes": 0, "seconds": 0.0, "hidden_seconds": 0.0}
    return {"seconds": 10.0, "communication_seconds": busy, "hidden_share": hidden, "waiting_seconds": waiting,
            "waits": 5, "operations": {"allreduce": kind, "barrier": barrier}}  # fmt: skip


def test_the_summary_names_the_rank_that_the_others_wait_for():
    assert summary({2: rank(1.0), 0: rank(1.5), 1: rank(0.25)}) == (
        "hvdlite summary: 3 ranks, 10.0 s; 12 tensors, 7.5 MB, in 3 collectives; communication 2.00 s (20.0 %), "
        "75 % of it hidden; callers waited 1.50 s (15.0 %) on rank 0 and 0.25 s (2.5 %) on rank 1, so rank 1 was the "
        "slowest and cost the others up to 1.25 s (12.5 %)."
    )


def test_a_summary_of_nothing_divides_by_nothing():
    assert summary({0: Metrics().snapshot() | {"seconds": 0.0}}) == (
        "hvdlite summary: 1 rank, 0.0 s; 0 tensors, 0 bytes, in 0 collectives; communication 0.00 s (0.0 %), "
        "100 % of it hidden; callers waited 0.00 s (0.0 %)."
    )
