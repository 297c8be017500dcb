"""What `hvdrun doctor` runs on its ranks: a sum that is known, a bandwidth, and what each rank may use.

    hvdrun -np 2 python -m hvdlite.testing.self_test REPORT

Rank 0 writes the report, JSON, into the file REPORT.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.affinity import cores_of_this_thread, describe_cores
from hvdlite.comm.peer_memory import open_peer_memory

_VALUES = 1001  # odd, so that it does not divide evenly
_BYTES, _REPEATS = 16 * 2**20, 7  # as large as a bucket of gradients


def main(argv: Sequence[str]) -> int:
    """Test, and write the report into the file `argv[0]`. Collective."""
    hvd.init()
    problem = _wrong_sum()
    ranks = hvd.allgather_object({"rank": hvd.rank(), "problem": problem, **_this_rank()})
    report = {
        "size": hvd.size(),
        "problems": [f"rank {one['rank']}: {one['problem']}" for one in ranks if one["problem"]],
        "bandwidth": _bandwidth(),
        "backend": hvd.backend_reasons().get("allreduce", ""),
        "peer_memory": _peer_memory(),
        "thread_level": _thread_level(),
        "ranks": ranks,
    }
    if hvd.rank() == 0:
        with open(argv[0], "w", encoding="utf-8") as file:
            json.dump(report, file)
    hvd.shutdown()
    return 0


def _wrong_sum() -> str:
    """Return what is wrong with the sum of numbers that differ between all places and ranks, "" if it is right."""
    size = hvd.size()
    found = hvd.allreduce(np.arange(float(_VALUES)) * size + hvd.rank(), op=hvd.Sum, name="self-test")
    expected = np.arange(float(_VALUES)) * size**2 + size * (size - 1) / 2
    wrong = np.flatnonzero(found != expected)
    if not wrong.size:
        return ""
    first = int(wrong[0])
    return f"{wrong.size} of {_VALUES} sums are wrong; number {first} is {found[first]!r}, not {expected[first]!r}"


def _bandwidth() -> float:
    """Return the bytes of a large array per second of its allreduce, on the slowest rank."""
    values = np.ones(_BYTES // 4, np.float32)
    seconds = []
    for _ in range(_REPEATS):
        hvd.barrier()
        started = time.perf_counter()
        hvd.allreduce_(values, op=hvd.Average, name="self-test bandwidth")
        seconds.append(time.perf_counter() - started)
    slowest = max(hvd.allgather_object(float(np.median(seconds[1:]))))  # the first one sets up
    return float(_BYTES / slowest)


def _this_rank() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "local_rank": hvd.local_rank(),
        "cores": describe_cores(cores_of_this_thread()),
    }


def _peer_memory() -> bool | None:
    """Return whether ranks may use each other's memory; None where they are on several hosts. Collective."""
    if hvd.cross_size() > 1:
        return None
    return open_peer_memory(hvd.rank(), hvd.allgather_object) is not None


def _thread_level() -> str:
    if not hvd.mpi_enabled():
        return ""
    from hvdlite.comm.mpi import thread_level  # late: only where MPI runs

    return thread_level()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
