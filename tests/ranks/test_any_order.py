"""Each rank submits in an order of its own; every operation still meets its counterparts."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

import hvdlite as hvd

SIZE = 3


def ten_operations(rank, k):
    """Return {name: (start, expected)} of one round; no two rounds, ranks or elements are alike."""
    x = np.arange(5.0) + 100 * k
    everyone = [x + r for r in range(SIZE)]
    rows = [np.full((r + k % 3, 2), 10 * k + r) for r in range(SIZE)]
    sent = [np.arange(6) + 10 * r + k for r in range(SIZE)]
    cut = [4, 1, 1] if k % 2 else [0, 3, 3]
    bounds = np.cumsum([0, *cut])
    ints = np.arange(7) * k
    return {
        "sum": (lambda: hvd.allreduce_async(everyone[rank], op=hvd.Sum, name="sum"), sum(everyone)),
        "max": (lambda: hvd.allreduce_async(everyone[rank], op=hvd.Max, name="max"), everyone[-1]),
        "mean of ints": (lambda: hvd.allreduce_async(ints * (rank + 1), name="mean of ints"), ints * 2),
        "half": (
            lambda: hvd.allreduce_async(np.full(3, k % 50 + rank, np.float16), op=hvd.Sum, name="half"),
            np.full(3, 3.0 * (k % 50) + 3),
        ),
        "gather": (lambda: hvd.allgather_async(rows[rank], name="gather"), np.concatenate(rows)),
        "cast": (lambda: hvd.broadcast_async(everyone[rank], k % SIZE, name="cast"), everyone[k % SIZE]),
        "exchange": (
            lambda: hvd.alltoall_async(sent[rank], cut, name="exchange"),
            (np.concatenate([s[bounds[rank] : bounds[rank + 1]] for s in sent]), [cut[rank]] * SIZE),
        ),
        "scatter": (
            lambda: hvd.reducescatter_async(x + rank, op=hvd.Sum, name="scatter"),
            np.array_split(3 * x + 3, SIZE)[rank],
        ),
        "group": (
            lambda: hvd.grouped_allreduce_async([x + rank, ints + rank], op=hvd.Sum, name="group"),
            [3 * x + 3, 3 * ints + 3],
        ),
        "fresh": (lambda: hvd.allreduce_async(np.array([k * (rank + 1)]), op=hvd.Sum, name=f"fresh{k}"), [6 * k]),
    }  # fmt: skip


def equal(found, expected):
    if isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("capacity", ["", "0", "5"], ids=["cache", "no cache", "small cache"])
def test_200_rounds_of_ten_operations_in_random_orders(on_ranks, monkeypatch, capacity):
    monkeypatch.setenv("HVDLITE_CACHE_CAPACITY", capacity)
    rounds = 200 if not capacity else 60

    def body(rank):
        rng = random.Random(rank)
        for k in range(rounds):
            operations = ten_operations(rank, k)
            order = rng.sample(sorted(operations), len(operations))
            handles = {name: operations[name][0]() for name in order}
            for name in rng.sample(sorted(handles), len(handles)):
                equal(handles[name].wait(), operations[name][1])

    on_ranks(SIZE, body, timeout=100)


def test_ranks_may_drift_apart_by_many_operations(on_ranks):
    # Rank 0 submits everything at once, rank 1 backwards, rank 2 one by one.
    names = [f"w{i}" for i in range(300)]

    def body(rank):
        def start(name):
            return hvd.allreduce_async(np.array([rank, int(name[1:])]), op=hvd.Sum, name=name)

        if rank == 2:
            results = {name: start(name).wait() for name in names}
        else:
            handles = {name: start(name) for name in (names if rank == 0 else reversed(names))}
            results = {name: handle.wait() for name, handle in handles.items()}
        for name, result in results.items():
            np.testing.assert_array_equal(result, [3, 3 * int(name[1:])])

    on_ranks(SIZE, body)


def test_several_threads_may_wait_for_the_handles_of_a_rank(on_ranks):
    def body(rank):
        handles = [hvd.allreduce_async(np.array([i * (rank + 1)]), op=hvd.Sum, name=f"w{i}") for i in range(50)]
        sums = [0] * 5

        def wait(part):
            sums[part] = sum(int(handle.wait()[0]) for handle in handles[part::5])

        threads = [threading.Thread(target=wait, args=(part,)) for part in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return sum(sums)

    assert on_ranks(SIZE, body) == [6 * sum(range(50))] * SIZE
