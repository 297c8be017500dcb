"""init() for torch programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hvdlite
from hvdlite import ProcessSet

from .kernels import register_kernels


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start hvdlite on this rank, with torch's arithmetic for half types. See `hvdlite.init`."""
    running = hvdlite.is_initialized()
    try:
        hvdlite.init(comm, process_sets)
    finally:  # a wrong process set is refused, but hvdlite runs
        if not running and hvdlite.is_initialized():
            register_kernels()
