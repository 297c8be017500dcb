"""Every operation once, over real MPI: backends named by the first argument, results against NumPy."""

from __future__ import annotations

import os
import sys

import ml_dtypes
import numpy as np

os.environ["HVDLITE_BACKEND"] = sys.argv[1]
import hvdlite as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
for dtype in (np.float32, np.float64, np.int32, np.uint8, np.float16, ml_dtypes.bfloat16, np.complex64):
    for n in (0, 1, 7, 1000, 100_003):
        x = (np.arange(n) % 11 + rank).astype(dtype)
        everyone = [
            (np.arange(n) % 11 + r).astype(np.complex128 if dtype == np.complex64 else np.float64) for r in range(size)
        ]
        np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Sum), sum(everyone).astype(dtype))
        np.testing.assert_array_equal(hvd.broadcast(x, size - 1), everyone[-1].astype(dtype))
        gathered = hvd.allgather(x[: n // 2 + rank])
        np.testing.assert_array_equal(
            gathered, np.concatenate([one[: n // 2 + r] for r, one in enumerate(everyone)]).astype(dtype)
        )
        rows = hvd.reducescatter(x, op=hvd.Sum)
        np.testing.assert_array_equal(rows, np.array_split(sum(everyone), size)[rank].astype(dtype))
        splits = [n // size] * size
        output, received = hvd.alltoall(x, splits)
        parts = [one[rank * (n // size) : (rank + 1) * (n // size)] for one in everyone]
        np.testing.assert_array_equal(output, np.concatenate(parts).astype(dtype))
        assert received.tolist() == splits
        if dtype != np.complex64:
            np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Max), everyone[-1].astype(dtype))
for k in range(20):
    names = np.random.default_rng(rank * 100 + k).permutation(30)
    handles = {i: hvd.allreduce_async(np.full(i + 1, rank + i), op=hvd.Sum, name=f"t{i}") for i in names.tolist()}
    for i, handle in handles.items():
        np.testing.assert_array_equal(handle.wait(), np.full(i + 1, sum(range(size)) + size * i))
pair = hvd.add_process_set([0, size - 1] if size > 1 else [0]) if size > 2 else hvd.global_process_set
if pair.included():
    assert int(hvd.allreduce(rank, op=hvd.Sum, process_set=pair)) == sum(pair.ranks)
assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
assert hvd.broadcast_object(lambda: rank, size - 1)() == size - 1 or rank != size - 1
for _ in range(rank):
    hvd.allreduce(1.0, name="uneven")
assert hvd.join() == size - 1
try:
    hvd.allreduce(np.ones(rank + 1), name="mismatch")
except hvd.MismatchError as error:
    assert (size > 1 and f"rank {size - 1}" in str(error)) or size > 4, error
hvd.barrier()
print(f"done {sorted(hvd.backend_reasons().items())}", flush=True)
