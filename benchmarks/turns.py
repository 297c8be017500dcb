"""What the benchmarks share: contenders that take turns in one job, and the machine they ran on."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

TURNS = 10  # of each contender
WARM_UP = 3  # repetitions at the start of a turn, not counted


def connect() -> Any:
    """Return MPI's world, with torch.distributed's gloo set up next to it. After hvd.init()."""
    from mpi4py import MPI  # late: the core prepares the environment of MPI

    comm = MPI.COMM_WORLD
    store = comm.bcast(tempfile.mkdtemp(prefix="gloo-") if comm.rank == 0 else None)
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=comm.rank, world_size=comm.size)
    torch.set_num_threads(1)
    return comm


def take_turns(
    contenders: dict[str, Callable[[], None]],
    repetitions: int,
    comm: Any,
    *,
    before: Callable[[str], None] = lambda name: None,
    after_turn: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Return the seconds of each repetition by contender: those of the slowest rank.

    MPI is silent within a turn: a rank that waits in an MPI call spins, and takes the core from others.

    Args:
        before: called before each repetition, not timed.
        after_turn: called after each turn, to check what was computed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    turn = max(1, repetitions // TURNS)
    for _ in range(-(-repetitions // turn)):
        for name, run in contenders.items():
            took = []
            comm.Barrier()
            for _ in range(WARM_UP + turn):
                before(name)
                started = time.perf_counter()
                run()
                took.append(time.perf_counter() - started)
            after_turn(name)
            everyone = comm.allgather(took[WARM_UP:])
            seconds[name].extend(map(max, zip(*everyone, strict=True)))
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine(comm: Any) -> dict[str, object]:
    """Return what the figures depend on."""
    from mpi4py import MPI

    return {
        "ranks": comm.size,
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "mpi": MPI.Get_library_version().split(",")[0].strip(),
    }
