"""What the benchmarks share: contenders that take turns in one job, and the machine they ran on."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.bench.turns import medians, take_turns

__all__ = ["connect", "machine", "medians", "take_turns"]


def connect() -> Any:
    """Return MPI's world, with torch.distributed's gloo set up next to it. After hvd.init()."""
    from mpi4py import MPI  # late: the core prepares the environment of MPI

    comm = MPI.COMM_WORLD
    store = comm.bcast(tempfile.mkdtemp(prefix="gloo-") if comm.rank == 0 else None)
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=comm.rank, world_size=comm.size)
    torch.set_num_threads(1)
    return comm


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
