"""`hvd.shared_zeros`: ordinary arrays which are reduced where they lie."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import runtime


def in_place():
    return "in which the tensors live" in hvd.backend_reasons()["allreduce"]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(), 1, 1001, (3, 0), (7, 11), [2, 3, 5], (3, 30_001)])
def test_arrays_and_views_of_them_are_reduced_in_place(on_ranks, size, shape):
    def body(rank):
        array = hvd.shared_zeros(shape, np.float32)
        assert not array.any() and array.dtype == np.float32
        values = np.arange(array.size, dtype=np.float32).reshape(array.shape) * size + rank
        found = []
        for turn in range(5):  # the schedule is learned meanwhile
            np.copyto(array, values)
            result = hvd.allreduce_(array, op=hvd.Sum, name="whole")
            assert result is array
            # Once learned, small ones are shown together with the rank's number.
            found.append((array.tolist(), in_place() or (turn > 0 and array.size < 10_000) or not array.size))
        if array.ndim == 2 and array.size:
            np.copyto(array, values)
            hvd.allreduce_(array[1:3], op=hvd.Sum)
            found.append((array.tolist(), in_place()))
        return found, array.shape

    n = int(np.prod(shape, dtype=int)) if shape != () else 1
    place = np.arange(n, dtype=np.float32).reshape(shape) * size
    wanted = (place * size + size * (size - 1) / 2).tolist()
    for rank, (found, found_shape) in enumerate(on_ranks(size, body)):
        assert found[:5] == [(wanted, True)] * 5
        assert found_shape == np.empty(shape).shape
        if len(found) > 5:
            wanted_part = (place + rank).tolist()
            wanted_part[1:3] = wanted[1:3]
            assert found[5] == (wanted_part, True)


def test_several_arrays_are_told_apart_and_forgotten_with_their_last_view(on_ranks):
    def body(rank):
        homes = runtime.current().engine_of(0).homes
        arrays = [hvd.shared_zeros(10 + i, np.int64) for i in range(3)]
        found = []
        for i, array in enumerate(arrays):
            array[:] = i + rank
            hvd.allreduce_(array, op=hvd.Sum)
            found.append((array[0].item(), in_place()))
        found.append(hvd.allreduce_(np.full(3, rank), op=hvd.Sum)[0].item())
        found.append(in_place())
        array = arrays[1][2:]
        del arrays
        gc.collect()
        array[:] = rank
        hvd.allreduce_(array, op=hvd.Sum)
        found.append((array[0].item(), in_place(), len(homes._by_address)))
        del array
        gc.collect()
        found.append(len(homes._by_address))
        return found

    for found in on_ranks(2, body):
        assert found == [(1, True), (3, True), (5, True), 1, False, (1, True, 1), 0]


def test_other_places_on_some_ranks_other_sets_and_after_shutdown_are_copied(on_ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 1])
        array, found = hvd.shared_zeros(8, np.float32), []
        for part in (array[4 * (rank == 1) :][:4], np.zeros(4, np.float32) if rank == 1 else array[:4]):
            part[:] = rank + 1
            hvd.allreduce_(part, op=hvd.Sum)
            found.append((part.tolist(), in_place()))
        if rank < 2:
            array[:] = rank + 1
            hvd.allreduce_(array, op=hvd.Sum, process_set=pair)
            found.append((array[7], in_place()))
        hvd.shutdown()
        hvd.init()
        array[:] = rank + 1
        hvd.allreduce_(array, op=hvd.Sum)
        found.append((array[7], in_place()))
        return found

    for rank, found in enumerate(on_ranks(3, body)):
        assert found == [([6] * 4, False)] * 2 + [(3, False)] * (rank < 2) + [(6, False)]


def test_of_a_process_set_it_serves_that_set(on_ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 2])
        if rank == 1:
            return None
        array = hvd.shared_zeros(5, np.float32, pair)
        array[:] = rank + 1
        hvd.allreduce_(array, op=hvd.Sum, process_set=pair)
        return array.tolist(), in_place()

    assert on_ranks(3, body) == [([4] * 5, True), None, ([4] * 5, True)]


def test_ranks_without_common_memory_get_private_zeros(on_ranks):
    def body(rank):
        array = hvd.shared_zeros((2, 3), np.int32)
        array += rank + 1
        return hvd.allreduce_(array, op=hvd.Sum).tolist()

    assert on_ranks(1, body) == [[[1] * 3] * 2]
    assert on_ranks(2, body, hosts=["a", "b"]) == [[[3] * 3] * 2] * 2


@pytest.mark.parametrize(("shape", "dtype"), [(-1, "float32"), ("12", "float32"), (2.5, "float32"), (3, "object")])
def test_what_is_wrong_raises_on_all_ranks_and_the_next_call_works(on_ranks, shape, dtype):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError if rank else hvd.RemoteError, match="expected|cannot be"):
            hvd.shared_zeros(shape if rank else 3, dtype if rank else "float32")
        with pytest.raises(hvd.MismatchError, match="size .*24 bytes on rank 0; 32 bytes on rank 1"):
            hvd.shared_zeros(3 + rank)
        return hvd.shared_zeros(3).nbytes

    assert on_ranks(2, body) == [24, 24]
