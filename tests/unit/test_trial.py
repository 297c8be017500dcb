"""Which way large tensors of a host go: the ranks try both, once, and agree."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.collectives import shared_memory, trial
from hvdlite.collectives.shared_memory import SharedMemoryBackend, segment_bytes
from hvdlite.dtypes import ReduceOp
from hvdlite.kernels import Kernels
from hvdlite.testing.ranks import run_ranks

PIECE = 4096


@pytest.mark.parametrize("other", [[0.0, 0.0], [5.0, 0.0]], ids=["alone", "with another rank's seconds"])
def test_the_fastest_of_all_ranks_wins_whatever_one_turn_took(monkeypatch, other):
    now = 0.0
    took = iter([9.0, 9.0, 1.0, 3.0, 8.0, 3.0, 1.0, 3.0, 1.0, 2.0, 1.0, 3.0])  # the first turn warms up
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now)

    def way():
        nonlocal now
        now += next(took)

    def add_up(seconds):
        assert seconds.tolist() == [1.0, 3.0]
        seconds += other

    assert trial.fastest([way, way], add_up) == (0 if other == [0.0, 0.0] else 1)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("winner", ["blocks", "peers"])
def test_large_tensors_go_the_way_that_won_and_it_is_tried_once(monkeypatch, size, winner):
    tried = []

    def tries_both(ways, add_up):
        for way in ways:
            way()
        seconds = np.array([1.0, 2.0])
        add_up(seconds)
        tried.append(seconds.tolist())
        return 0 if winner == "blocks" else 1

    monkeypatch.setattr(shared_memory, "fastest", tries_both)
    large = 128 * 1024 * (size - 1) ** 3 // 4  # elements: 2 (P - 1)**3 times 128 KiB, in float64

    def body(comm):
        segment = comm.shared_segment(segment_bytes(PIECE))
        backend = SharedMemoryBackend(comm, Kernels(), segment, PIECE, comm.peer_memory())
        calls = []
        real = backend._direct.through_peers
        backend._direct.through_peers = lambda *args: (calls.append(1), real(*args))
        small = np.ones(3)
        backend.allreduce([small], [small], ReduceOp.SUM)
        assert small.tolist() == [size] * 3
        assert not tried
        for _ in range(3):
            values = np.arange(large, dtype=np.float64) + comm.rank
            backend.allreduce([values], [values], ReduceOp.SUM)
            np.testing.assert_array_equal(values, np.arange(large) * size + size * (size - 1) // 2)
            backend.broadcast(values, size - 1)
        backend.close()
        return len(calls)

    direct = 1 if winner == "blocks" else 4  # the trial's own, and then the three calls
    assert run_ranks(size, body) == [direct] * size
    assert tried == [[size * 1.0, size * 2.0]] * size
