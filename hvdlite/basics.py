"""Horovod's object of queries, which tools reach through `hvd.mpi_ops._basics`."""

from __future__ import annotations

from typing import Any

import hvdlite
from hvdlite import runtime


class HorovodBasics:
    """Has the functions of `hvdlite` (init, rank, size, …) as methods. The arguments are those of Horovod's."""

    def __init__(self, *libraries: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(hvdlite, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return runtime.current("process sets").ranks_by_id()
