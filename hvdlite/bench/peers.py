"""Who hvdlite is measured against: raw MPI on the job's own communicator, and torch's gloo next to it.

The only file besides `comm/mpi.py` that uses mpi4py: here it is measured, not used.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hvdlite as hvd
from hvdlite.bench.turns import Alone, Ranks

Array = NDArray[Any]


def ranks() -> Ranks:
    """Return what the contenders take turns with. After `hvd.init()`."""
    if not hvd.mpi_enabled():
        return Alone()
    from mpi4py import MPI  # late: the core prepares the environment of MPI

    world: Ranks = MPI.COMM_WORLD
    return world


def start_gloo(comm: Ranks) -> str:
    """Set up torch.distributed over gloo. Collective. Returns what `stop_gloo` wants to have.

    Raises:
        RuntimeError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError("gloo comes with torch, which is not installed: pip install torch")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    folder: str = comm.bcast(tempfile.mkdtemp(prefix="gloo-") if comm.rank == 0 else None)
    # All hosts must see the folder; between machines TMPDIR has to be a common one.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    return folder


def stop_gloo(folder: str, comm: Ranks) -> None:
    """End torch.distributed. Collective."""
    import torch.distributed as dist

    comm.Barrier()
    dist.destroy_process_group()
    comm.Barrier()  # a store that is left while its file goes away waits for it, five minutes
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def mpi(collective: str, source: Array, target: Array) -> None:
    """Run one collective by MPI itself; `source` and `target` as in `operations.py`."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if collective == "allreduce":
        comm.Allreduce(MPI.IN_PLACE, target)
    elif collective == "broadcast":
        comm.Bcast(target, 0)
    elif collective == "allgather":
        comm.Allgather(source, target)
    elif collective == "alltoall":
        comm.Alltoall(source, target)
    else:
        comm.Reduce_scatter_block(source, target)


def gloo(collective: str, source: Any, target: Any) -> None:
    """Run one collective by torch's gloo, on tensors."""
    import torch.distributed as dist

    if collective == "allreduce":
        dist.all_reduce(target)
    elif collective == "broadcast":
        dist.broadcast(target, 0)
    elif collective == "allgather":
        _either(dist, "all_gather_single", "all_gather_into_tensor")(target, source)
    elif collective == "alltoall":
        dist.all_to_all_single(target, source)
    else:
        _either(dist, "reduce_scatter_single", "reduce_scatter_tensor")(target, source)


def _either(module: Any, new: str, old: str) -> Any:
    """Return a function under its new name, or its old one, which newer versions of torch warn of."""
    return getattr(module, new, None) or getattr(module, old)


def as_tensor(array: Array) -> Any:
    """Return a torch tensor over the memory of `array`."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def machine(comm: Ranks) -> dict[str, object]:
    """Return what the figures depend on."""
    facts: dict[str, object] = {
        "ranks": comm.size,
        "hosts": hvd.cross_size(),
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "hvdlite": hvd.__version__,
    }
    if "torch" in sys.modules:
        facts["torch"] = sys.modules["torch"].__version__
    if hvd.mpi_enabled():
        from mpi4py import MPI

        facts["mpi"] = MPI.Get_library_version().split(",")[0].strip()
    return facts
