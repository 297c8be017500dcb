"""One test body over every communicator: threads as ranks, and, under mpirun with the lockstep plugin, processes.

python -m pytest tests/conformance
mpirun -n 4 python -m pytest -p hvdlite.testing.lockstep tests/conformance
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hvdlite.comm.base import Communicator
from hvdlite.config import Config
from hvdlite.testing.ranks import run_ranks

SIZES = (1, 2, 3, 4, 7)
LOCKSTEP = "hvdlite-lockstep"  # hvdlite.testing.lockstep.NAME, which needs MPI


class OnGroup:
    """Runs a body on a fresh group of `size` ranks.

    The body makes its own assertions, because under MPI this process has only its own rank.
    """

    def __init__(self, size: int, lockstep: Any) -> None:
        self.size, self._lockstep = size, lockstep

    def __call__(self, body: Callable[[Communicator], Any], hosts: Sequence[str] | None = None) -> list[Any]:
        """Run `body(comm)`. Returns the results of the ranks that live in this process: all, one, or none.

        Args:
            hosts: host name of each rank, to pretend that there are several.
        """
        if self._lockstep is None:
            return run_ranks(self.size, body, hosts)
        from hvdlite.comm import mpi

        rank = self._lockstep.comm.rank
        if rank >= self.size:
            return []
        config = Config(shared_memory_dir=os.environ.get("HVDLITE_TEST_MEMORY", "/dev/shm"))
        comm = mpi.world(ranks=range(self.size), config=config, host=hosts[rank] if hosts else None)
        result = body(comm)
        comm.close()  # collective, so not after a failure
        return [result]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "on_group" in metafunc.fixturenames:
        lockstep = metafunc.config.pluginmanager.get_plugin(LOCKSTEP)
        sizes = [size for size in SIZES if lockstep is None or size <= lockstep.comm.size]
        metafunc.parametrize("on_group", sizes, indirect=True, ids=lambda size: f"{size}ranks")


@pytest.fixture
def on_group(request: pytest.FixtureRequest) -> OnGroup:
    """A fresh group of each size in turn, that can run a body on its ranks."""
    return OnGroup(request.param, request.config.pluginmanager.get_plugin(LOCKSTEP))
