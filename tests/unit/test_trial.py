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


def watch(owner, name, calls):
    real = getattr(owner, name)

    def noting(*args):
        calls.append(name)
        return real(*args)

    setattr(owner, name, noting)


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
        watch(backend._direct, "through_peers", calls)
        watch(backend._copies, "allgather", calls)
        watch(backend._copies, "broadcast", calls)
        small = np.ones(3)
        backend.allreduce([small], [small], ReduceOp.SUM)
        assert small.tolist() == [size] * 3
        assert not tried
        for _ in range(3):
            values = np.arange(large, dtype=np.float64) + comm.rank
            backend.allreduce([values], [values], ReduceOp.SUM)
            np.testing.assert_array_equal(values, np.arange(large) * size + size * (size - 1) // 2)
            everybody = np.empty(large * size)
            backend.allgather([values + comm.rank], [[large] * size], [everybody])
            for rank in range(size):
                np.testing.assert_array_equal(everybody[rank * large : (rank + 1) * large], values + rank)
            sent = values + comm.rank
            backend.broadcast(sent, size - 1)
            np.testing.assert_array_equal(sent, values + size - 1)
        backend.close()
        assert ("straight between" in backend.remark) == (winner == "peers")
        return calls

    trial_alone = ["through_peers"]
    calls = trial_alone if winner == "blocks" else trial_alone + ["through_peers", "allgather", "broadcast"] * 3
    assert run_ranks(size, body) == [calls] * size
    assert tried == [[size * 1.0, size * 2.0]] * size
