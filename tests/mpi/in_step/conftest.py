"""Tests that need MPI and all its ranks: run by tests/mpi/test_communicator.py, or by hand:

mpirun -n 3 python -m pytest -p hvdlite.testing.lockstep tests/mpi/in_step
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if config.pluginmanager.has_plugin("hvdlite-lockstep") else True


@pytest.fixture(scope="module")
def comm():
    """All ranks. One group for many tests: some MPIs need milliseconds to make one."""
    from hvdlite.comm import mpi

    world = mpi.world()
    yield world
    world.close()
