"""Tensors that live in memory which all ranks see: reduced there, with the bits of tensors that are copied."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import lowlevel
from hvdlite.comm.loopback import LoopbackCommunicator
from hvdlite.dtypes import SUPPORTED

SIZES = [2, 3, 4, 7]


def allreduce(arrays, home=None, names=None, **how):
    """Sum `arrays` in place, as one group."""
    names = names or [f"t{i}" for i in range(len(arrays))]
    items = [lowlevel.Item(a, a, home=home) for a in arrays]
    how.setdefault("op", lowlevel.ReduceOp.SUM)
    for handle in lowlevel.start(lowlevel.Kind.ALLREDUCE, names, items, hvd.global_process_set, **how):
        handle.wait()


def values(rank, n, dtype):
    rng = np.random.default_rng(100 * n + rank)
    wanted = SUPPORTED[dtype]
    if wanted.kind in "iu":
        return rng.integers(0, 100, n).astype(wanted)
    return rng.standard_normal(n).astype(np.float32).astype(wanted)


def in_place(rank, lengths, dtype, gap=0, **how):
    """Return the results of the copying way and of the way in place."""
    itemsize = SUPPORTED[dtype].itemsize
    shared = lowlevel.shared_buffer(sum((n + gap) * itemsize for n in lengths) + 64, hvd.global_process_set)
    wanted, found, at = [], [], 0
    for n in lengths:
        wanted.append(values(rank, n, dtype))
        found.append(shared.array[at : at + n * itemsize].view(SUPPORTED[dtype]))
        found[-1][:] = wanted[-1]
        at += (n + gap) * itemsize
    allreduce(wanted, **how)
    allreduce(found, shared, **how)
    return [w.tobytes() for w in wanted], [f.tobytes() for f in found], hvd.backend_reasons()["allreduce"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int32", "complex64"])
def test_the_bits_are_those_of_the_copying_way(on_ranks, size, dtype):
    lengths = [1, 3, 17, 0, 1000, 70_001]
    for wanted, found, reason in on_ranks(size, lambda rank: in_place(rank, lengths, dtype)):
        assert found == wanted
        assert "in which the tensors live" in reason


def lent(rank, lengths, dtype, private, gap=0, **how):
    """Return the results of the copying way and of tensors that lie elsewhere where `private` says so."""
    itemsize = SUPPORTED[dtype].itemsize
    shared = lowlevel.shared_buffer(sum((n + gap) * itemsize for n in lengths) + 64, hvd.global_process_set)
    wanted, items, at = [], [], 0
    for i, n in enumerate(lengths):
        wanted.append(values(rank, n, dtype))
        target = shared.array[at : at + n * itemsize].view(SUPPORTED[dtype])
        source = wanted[-1].copy() if private(rank, i) else target
        target[:] = 7 if source is not target else wanted[-1]
        items.append(lowlevel.Item(source, target, home=shared))
        at += (n + gap) * itemsize
    given = [item.source.tobytes() for item in items]
    allreduce(wanted, **how)
    names = [f"t{i}" for i in range(len(items))]
    how.setdefault("op", lowlevel.ReduceOp.SUM)
    for handle in lowlevel.start(lowlevel.Kind.ALLREDUCE, names, items, hvd.global_process_set, **how):
        handle.wait()
    untouched = all(
        item.source is item.target or item.source.tobytes() == b for item, b in zip(items, given, strict=True)
    )
    found = [item.target.tobytes() for item in items]
    return [w.tobytes() for w in wanted], found, untouched, hvd.backend_reasons()["allreduce"]


PRIVATE = {
    "everywhere": lambda rank, i: True,
    "on one rank": lambda rank, i: rank == 1,
    "in turn": lambda rank, i: (rank + i) % 2 == 0,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("private", PRIVATE)
def test_results_go_into_it_from_memory_elsewhere_with_the_same_bits(on_ranks, size, dtype, private):
    lengths = [1, 3, 1024, 0, 1000, 70_001, 17]
    for wanted, found, untouched, reason in on_ranks(size, lambda rank: lent(rank, lengths, dtype, PRIVATE[private])):
        assert found == wanted
        assert untouched
        assert "in which the tensors live" in reason


@pytest.mark.parametrize("op", [hvd.Average, hvd.Min, hvd.Product])
def test_every_operation_and_factor_from_elsewhere(on_ranks, op):
    how = {"op": lowlevel.ReduceOp(op), "prescale": 0.3, "postscale": 1.7, "gap": 3}
    for wanted, found, untouched, _ in on_ranks(
        3, lambda rank: lent(rank, [5, 129, 4096], "float32", PRIVATE["in turn"], **how)
    ):
        assert found == wanted
        assert untouched


@pytest.mark.parametrize("op", [hvd.Average, hvd.Min, hvd.Max, hvd.Product])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_every_operation_and_factor(on_ranks, op, dtype):
    op = lowlevel.ReduceOp(op)
    factors = {} if dtype == "int32" else {"prescale": 0.3, "postscale": 1.7}
    for wanted, found, _ in on_ranks(3, lambda rank: in_place(rank, [5, 129, 4096], dtype, gap=3, op=op, **factors)):
        assert found == wanted


def test_other_places_on_some_ranks_are_copied(on_ranks):
    def body(rank):
        shared = lowlevel.shared_buffer(4096, hvd.global_process_set)
        array = shared.array[64 * rank : 64 * rank + 40].view(np.float32)
        array[:] = np.arange(10) + rank
        for _ in range(3):  # the second and third from the cache
            array[:] = np.arange(10) + rank
            allreduce([array], shared)
        return array.tolist(), hvd.backend_reasons()["allreduce"]

    for found, reason in on_ranks(3, body):
        assert found == [3 * i + 3 for i in range(10)]
        assert "in which" not in reason


def test_closed_here_or_private_here_is_copied(on_ranks):
    def body(rank):
        found = []
        shared = lowlevel.shared_buffer(4096, hvd.global_process_set)
        mine = shared.array[:400].view(np.float32)
        private = np.empty(100, np.float32)
        for turn in range(5):
            if turn == 2 and rank == 1:
                shared.close()
            array = private if turn == 1 and rank == 0 else mine
            array[:] = np.arange(100) * (rank + 1)
            allreduce([array], None if array is private else shared)
            found.append((array[99], "in which" in hvd.backend_reasons()["allreduce"]))
        return found

    for found in on_ranks(2, body):
        assert found == [(297, True), (297, False), (297, False), (297, False), (297, False)]


def test_it_serves_one_process_set_until_shutdown(on_ranks):
    def body(rank):
        first = hvd.add_process_set([0, 1])
        shared = lowlevel.shared_buffer(4096, hvd.global_process_set)
        array = shared.array[:8].view(np.float32)
        array[:] = rank + 1
        if rank < 2:
            item = lowlevel.Item(array, array, home=shared)
            lowlevel.start(lowlevel.Kind.ALLREDUCE, ["s"], [item], first)[0].wait()
        first_sum = array[0]
        hvd.shutdown()
        hvd.init()
        array[:] = rank + 1
        allreduce([array], shared)
        return first_sum, array[1], "in which" in hvd.backend_reasons()["allreduce"]

    assert on_ranks(3, body) == [(3, 6, False), (3, 6, False), (3, 6, False)]


def test_the_memory_outlives_its_owner_and_goes_with_the_last_view(on_ranks):
    def body(rank):
        shared = lowlevel.shared_buffer(8192, hvd.global_process_set)
        assert shared.array.ctypes.data % 4096 == 0 and shared.nbytes == 8192 and not shared.array.any()
        view = shared.array[100:200]
        gone = weakref.ref(shared)
        del shared
        gc.collect()
        assert gone() is None
        view[:] = rank
        hvd.barrier()
        return view.tolist() == [rank] * 100

    assert on_ranks(2, body) == [True, True]


def test_a_joined_rank_gives_nothing_and_the_others_are_copied(on_ranks):
    def body(rank):
        shared = lowlevel.shared_buffer(64, hvd.global_process_set)
        array = shared.array[:8].view(np.float32)
        array[:] = 5
        if rank == 0:
            hvd.join()
            return array.tolist()
        allreduce([array], shared)
        more = lowlevel.shared_buffer(64, hvd.global_process_set, "more")
        hvd.join()
        return array.tolist(), more.nbytes

    assert on_ranks(3, body) == [[5, 5], ([10, 10], 64), ([10, 10], 64)]


def test_what_is_wrong_raises_on_all_ranks_and_the_next_call_works(on_ranks):
    def body(rank):
        with pytest.raises(hvd.MismatchError, match="size .*100 bytes on rank 0; 101 bytes on rank 1"):
            lowlevel.shared_buffer(100 + rank, hvd.global_process_set, "m")
        with pytest.raises(hvd.InvalidRequestError if rank else hvd.RemoteError, match="positive"):
            lowlevel.shared_buffer(-1 if rank else 10, hvd.global_process_set, "n")
        return lowlevel.shared_buffer(10, hvd.global_process_set, "m").nbytes

    assert on_ranks(2, body) == [10, 10]


def test_one_rank_and_ranks_on_two_hosts_share_nothing(on_ranks):
    def body(rank):
        return lowlevel.shared_buffer(10, hvd.global_process_set)

    assert on_ranks(1, body) == [None]
    assert on_ranks(2, body, hosts=["a", "b"]) == [None, None]


def test_an_array_elsewhere_has_no_home(on_ranks):
    def body(rank):
        shared = lowlevel.shared_buffer(4096, hvd.global_process_set)
        group = shared._group
        inside = shared.array[8:16].view(np.float32)
        assert shared.home_of(inside, group)[:2] == (1, 8)
        assert shared.home_of(shared.array[2:6].view(np.float32), group) is None  # not aligned
        assert shared.home_of(np.empty(4), group) is None
        assert shared.home_of(inside, object()) is None
        return True

    assert on_ranks(2, body) == [True, True]


def test_no_room_is_none_on_all_ranks_and_said_once(on_ranks, monkeypatch, capfd):
    monkeypatch.setattr(LoopbackCommunicator, "shared_blocks", lambda self, nbytes: None)

    def body(rank):
        made = [lowlevel.shared_buffer(10, hvd.global_process_set) for _ in range(3)]
        array = np.full(3, rank + 1, np.float32)
        allreduce([array], made[0])
        return made, array.tolist()

    assert on_ranks(2, body) == [([None] * 3, [3, 3, 3])] * 2
    assert capfd.readouterr().err.count("no room in") == 1
