"""The stall watch in a running job: what it says, and that it can stop the job."""

from __future__ import annotations

import inspect
import re
import threading

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.observe import log


@pytest.fixture
def warnings_of_the_log(monkeypatch):
    """Texts of warnings, and an event that is set at the first."""
    texts, told = [], threading.Event()

    def warning(text, *arguments, **_):
        texts.append(text % arguments if arguments else text)
        told.set()

    monkeypatch.setattr(log.get_logger(), "warning", warning)
    return texts, told


@pytest.mark.parametrize("late", [0, 2])
def test_a_warning_names_tensor_kind_shape_place_and_the_missing_ranks(
    on_ranks, monkeypatch, warnings_of_the_log, late
):
    monkeypatch.setenv("HVDLITE_STALL_WARNING", "0.3")
    texts, told = warnings_of_the_log
    lines = {}

    def body(rank):
        hvd.allreduce(np.ones(1), name="finished before")
        if rank == late:
            assert told.wait(10)
        lines[rank] = inspect.currentframe().f_lineno + 1
        return hvd.allreduce(np.ones((3, 4), np.float16), op=hvd.Sum, name="layer1.weight")[0, 0]

    assert on_ranks(3, body) == [3] * 3
    text = next(text for text in texts if "'layer1.weight'" in text)
    first = rf"stalled for \d s: allreduce of tensor 'layer1.weight', float16\[3, 4\], waits for rank {late}."
    assert re.fullmatch(first, text.splitlines()[0])
    for rank in range(3):
        (line,) = [line for line in text.splitlines() if line.startswith(f"  rank {rank}:")]
        assert ("has not submitted it" in line) == (rank == late)
        assert (f"submitted it at {__file__}:{lines[rank]}" in line) == (rank != late)
        assert "finished last: allreduce 'finished before'" in line
        assert "is now at " in line


def test_several_missing_ranks_are_listed(on_ranks, monkeypatch, warnings_of_the_log):
    monkeypatch.setenv("HVDLITE_STALL_WARNING", "0.3")
    texts, told = warnings_of_the_log

    def body(rank):
        if rank != 1:
            assert told.wait(10)
        hvd.barrier()

    on_ranks(4, body)
    assert "barrier of tensor 'barrier.noname.1'" in texts[0]
    assert "waits for ranks 0, 2, 3." in texts[0]


def test_nothing_is_said_when_all_come_in_time_or_the_watch_is_off(on_ranks, monkeypatch, warnings_of_the_log):
    texts, _ = warnings_of_the_log
    on_ranks(2, lambda rank: hvd.allreduce(np.ones(1)))
    monkeypatch.setenv("HVDLITE_STALL_WARNING", "0")
    may_come = threading.Event()

    def body(rank):
        if rank:
            assert not may_come.wait(0.5)  # longer than an engine sleeps while something is pending
        return hvd.allreduce(np.ones(1))

    on_ranks(2, body)
    assert texts == []


def test_the_job_stops_after_the_second_limit(on_ranks, monkeypatch, warnings_of_the_log):
    monkeypatch.setenv("HVDLITE_STALL_WARNING", "0.2")
    monkeypatch.setenv("HVDLITE_STALL_SHUTDOWN", "0.6")
    stopped = threading.Barrier(3)

    def body(rank):
        if rank == 1:
            stopped.wait(10)
            with pytest.raises(hvd.ShutdownError, match="rank 0 gave up: tensor '(lonely|other)' waited"):
                hvd.allreduce(np.ones(1), name="lonely")
            return
        other = hvd.allreduce_async(np.ones(1), name="other") if rank == 0 else None
        with pytest.raises(
            hvd.StallError, match="'lonely' waited .* for rank 1, over HVDLITE_STALL_SHUTDOWN=0.6"
        ) as caught:
            hvd.allreduce(np.ones(1), name="lonely")
        assert isinstance(caught.value, hvd.HorovodInternalError)
        if other is not None:
            with pytest.raises((hvd.ShutdownError, hvd.StallError)):
                other.wait(5)
        stopped.wait(10)

    on_ranks(3, body)
    assert any("'lonely'" in text for text in warnings_of_the_log[0])
