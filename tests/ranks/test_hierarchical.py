"""Large allreduces of several ranks on several hosts, in pieces that cross the network while others are in memory."""

import threading

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.collectives.hierarchical import HierarchicalBackend

LAYOUTS = ["aabb", "abab", "aaab", "aabc", "aaabbbb"]
PIECE = 4 * 4096  # bytes


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Make pieces small, and note how many bytes went in pieces."""
    monkeypatch.setenv("HVDLITE_SHARED_MEMORY_PIECE", "4096")
    seen, run = [], HierarchicalBackend._reduce_pieces

    def spy(self, length, sources, *more):
        seen.append(length * sources[0].itemsize)
        run(self, length, sources, *more)

    monkeypatch.setattr(HierarchicalBackend, "_reduce_pieces", spy)
    return seen


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_pieces_of_many_tensors_add_up(on_ranks, calls, hosts, dtype):
    size = len(hosts)
    lengths = [5, 0, 3 * PIECE // 4 + 1, 1, PIECE // 2 - 3, 7777]

    def body(rank):
        # Element j of tensor t of rank r is unlike every other.
        tensors = [(np.arange(n) * size + rank + 10_000 * t).astype(dtype) for t, n in enumerate(lengths)]
        results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        again = hvd.grouped_allreduce_([t.copy() for t in tensors], op=hvd.Average, prescale_factor=2.0)
        return results, again

    for results, again in on_ranks(size, body, hosts=list(hosts)):
        for t, n in enumerate(lengths):
            total = np.arange(n) * size**2 + size * (size - 1) // 2 + 10_000 * t * size
            np.testing.assert_array_equal(results[t], total.astype(dtype))
            average = (2 * total / size).astype(dtype)
            np.testing.assert_allclose(again[t], average, rtol=0 if dtype == "int64" else 1e-6)  # a factor of 1 / size
    assert len(calls) == 2 * size and min(calls) >= 2 * PIECE


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_sums_that_round_have_the_same_bits_everywhere(on_ranks, calls, hosts):
    def body(rank):
        values = np.sin(np.arange(40_001, dtype=np.float32) * (1 + rank))
        return [hvd.allreduce(values, op=hvd.Average, name="x").tobytes() for _ in range(6)]

    results = on_ranks(len(hosts), body, hosts=list(hosts))
    assert len({one for result in results for one in result}) == 1
    exact = np.mean([np.sin(np.arange(40_001) * (1.0 + rank)) for rank in range(len(hosts))], axis=0)
    np.testing.assert_allclose(np.frombuffer(results[0][0], np.float32), exact, atol=3e-3)
    assert calls


def test_less_than_two_pieces_and_halves_go_as_one(on_ranks, calls):
    def body(rank):
        one = hvd.allreduce(np.full(2 * PIECE // 4 - 1, rank + 1.0, np.float32), op=hvd.Sum)
        half = hvd.allreduce(np.full(4 * PIECE, rank + 1.0, np.float16), op=hvd.Sum)
        return set(one.tolist()) | set(half.tolist())

    assert on_ranks(4, body, hosts=list("aabb")) == [{10.0}] * 4
    assert not calls


def test_nothing_runs_on_after_shutdown(on_ranks, calls):
    def body(rank):
        hvd.allreduce(np.ones(PIECE, np.float32), op=hvd.Sum)
        hvd.shutdown()

    on_ranks(4, body, hosts=list("aabb"))
    assert calls
    assert "hvdlite network" not in [thread.name for thread in threading.enumerate()]
