"""Who am I, who else is there, and what is built in. None of it is collective."""

from __future__ import annotations

import importlib.util
from typing import Any

from hvdlite import runtime


def rank() -> int:
    """Return this process' number among all ranks, from 0."""
    return runtime.current("hvd.rank()").rank


def size() -> int:
    """Return the number of ranks."""
    return runtime.current("hvd.size()").size


def local_rank() -> int:
    """Return this process' number among the ranks of its host."""
    return runtime.current("hvd.local_rank()").topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return runtime.current("hvd.local_size()").topology.local_size


def cross_rank() -> int:
    """Return this host's number among the hosts that have a rank with this local rank."""
    return runtime.current("hvd.cross_rank()").topology.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return runtime.current("hvd.cross_size()").topology.cross_size


def is_homogeneous() -> bool:
    """Return whether every host has equally many ranks."""
    return runtime.current("hvd.is_homogeneous()").topology.is_homogeneous


def backend_reasons() -> dict[str, str]:
    """Return, for each kind of operation that has run, which backend ran it last, and why."""
    return dict(runtime.current("hvd.backend_reasons()").reasons.by_kind)


def metrics() -> dict[str, Any]:
    """Return what this rank has communicated since `init()`, and how much of it the program did not notice.

    Communication is hidden while no caller waits for an operation. `seconds` since `init()`; `communication_seconds`
    that collectives took, over all process sets, with what they waited for each other; `hidden_share` of these, 0 to 1
    (1 if nothing ran); `waiting_seconds` that callers waited, which includes waiting for slower ranks; `waits` is how
    often; `operations` has for each kind that ran `batches`, `tensors`, `bytes`, `seconds`, `hidden_seconds`.
    """
    return runtime.current("hvd.metrics()").metrics.snapshot()


def mpi_threads_supported() -> bool:
    """Return whether MPI lets several threads use it (MPI_THREAD_MULTIPLE). True without MPI."""
    native = runtime.current("hvd.mpi_threads_supported()").world.native
    return True if native is None else bool(native.threads_multiple)


def mpi_enabled() -> bool:
    """Return whether this run communicates through MPI. False before `init()`, and for one rank alone."""
    return runtime.is_running() and runtime.current().world.native is not None


def mpi_built() -> bool:
    """Return whether MPI can be used: mpi4py is installed. (It finds an MPI library at `init()`.)"""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """False: hvdlite has no Gloo."""
    return False


def gloo_built() -> bool:
    """False: hvdlite has no Gloo."""
    return False


def nccl_built() -> int:
    """Return NCCL's version code, 0 while hvdlite does not use it."""
    return 0


def ddl_built() -> bool:
    """False: hvdlite has no DDL."""
    return False


def ccl_built() -> bool:
    """False: hvdlite has no oneCCL."""
    return False


def cuda_built() -> bool:
    """False: this version reduces in host memory."""
    return False


def rocm_built() -> bool:
    """False: this version reduces in host memory."""
    return False
