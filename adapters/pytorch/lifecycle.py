"""init() for torch programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hvdlite
from hvdlite import ProcessSet

from .kernels import register_kernels


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start hvdlite on this rank, with torch's arithmetic for half types. Collective over the ranks that it is to have.

    Calling it again while it runs only binds `process_sets` to what is registered.

    Args:
        comm: None for all ranks of the job; a list of ranks of MPI_COMM_WORLD, numbered anew in the list's
            order; or an mpi4py communicator, which is duplicated.
        process_sets: sets to register, the same on every rank; they get the ids 1, 2, … "dynamic" is accepted
            and changes nothing, since sets may always come and go.

    Raises: what `hvdlite.init` does.
    """
    running = hvdlite.is_initialized()
    try:
        hvdlite.init(comm, process_sets)
    finally:  # a wrong process set is refused, but hvdlite runs
        if not running and hvdlite.is_initialized():
            register_kernels()
