"""Run by every rank of a job over several hosts: collectives against what each rank can compute by itself.

collectives.py                   everything; prints which backends ran the small and the large allreduce
collectives.py sent BYTES DTYPE  one allreduce; prints how many bytes this host has sent
"""

from __future__ import annotations

import sys
import time

import ml_dtypes
import numpy as np

import hvdlite as hvd

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = [0, 1, 5, 255, 5001, 200_003]


def values(rank: int, length: int, dtype: np.dtype) -> np.ndarray:
    """Return small integers, whose sums are exact in every dtype, different for each rank."""
    return (np.arange(length) % 7 + rank).astype(dtype)


def total(length: int, dtype: np.dtype) -> np.ndarray:
    return sum(values(rank, length, np.dtype(np.float64)) for rank in range(hvd.size())).astype(dtype)


def everything() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in map(np.dtype, ("float32", "float64", "int32", "float16", BFLOAT16)):
        for length in LENGTHS:
            mine = values(rank, length, dtype)
            same(hvd.allreduce(mine, op=hvd.Sum), total(length, dtype))
            same(hvd.allreduce(mine, op=hvd.Max), values(size - 1, length, dtype))
    tensors = [values(rank, length, np.dtype(np.float32)) for length in LENGTHS]
    for found, length in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), LENGTHS, strict=True):
        same(found, total(length, np.dtype(np.float32)))
    # Sums that need rounding: the same bits everywhere, whatever they are.
    for dtype in (np.dtype(np.float32), BFLOAT16):
        for length in (100, 50_001):
            found = hvd.allreduce(np.sin(np.arange(length) + 3.7 * rank).astype(dtype), op=hvd.Average)
            assert len(set(hvd.allgather_object(found.tobytes()))) == 1
    for root in range(size):
        for length in (0, 3, 100_001):
            same(
                hvd.broadcast(values(rank, length, np.dtype(np.int64)), root), values(root, length, np.dtype(np.int64))
            )
    rows = [values(r, 10 * r + 1, np.dtype(np.float32)) for r in range(size)]
    same(hvd.allgather(rows[rank]), np.concatenate(rows))
    same(hvd.reducescatter(values(rank, 8 * size, np.dtype(np.float32)), op=hvd.Sum),
         total(8 * size, np.dtype(np.float32))[8 * rank : 8 * (rank + 1)])  # fmt: skip
    received = hvd.alltoall(np.full(size, rank, np.int32))
    same(received[0] if isinstance(received, tuple) else received, np.arange(size, dtype=np.int32))
    try:
        hvd.allreduce(np.zeros(3 + rank), name="shapes differ")
    except hvd.HvdliteError:
        pass
    else:
        raise AssertionError("different shapes were accepted")
    backends = []
    for length in (10, 10**6):
        same(hvd.allreduce(np.ones(length, np.float32), op=hvd.Sum), np.full(length, size, np.float32))
        reason = hvd.backend_reasons()["allreduce"]
        words = {"each byte": "hierarchical", "fewest steps": "tree", "fewest bytes": "ring"}
        backends.append(next(name for text, name in words.items() if text in reason))
    print("by", " ".join(dict.fromkeys(backends)))


def sent(nbytes: int, dtype: np.dtype) -> None:
    array = values(hvd.rank(), nbytes // dtype.itemsize, dtype)
    hvd.allreduce(array, op=hvd.Sum, name="warm")
    hvd.barrier()
    before = sent_so_far()
    hvd.allreduce(array, op=hvd.Sum, name="counted")
    hvd.barrier()
    time.sleep(0.1)  # until what was acknowledged last is counted
    print("sent", sent_so_far() - before)


def sent_so_far() -> int:
    with open("/proc/net/dev") as file:
        return next(int(line.split(":")[1].split()[8]) for line in file if line.strip().startswith("eth0:"))


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found.dtype, found.shape, wanted.shape)
    assert found.tobytes() == wanted.tobytes()


hvd.init()
if sys.argv[1:]:
    sent(int(sys.argv[2]), np.dtype(BFLOAT16 if sys.argv[3] == "bfloat16" else sys.argv[3]))
else:
    everything()
print("done")
hvd.shutdown()
