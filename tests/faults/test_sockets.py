"""hvdlite listens nowhere: what listens in a job belongs to MPI, and is there without hvdlite, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "sockets.py"

pytestmark = pytest.mark.mpi


def listening(mpi, *arguments: str) -> list[int]:
    """Return how many TCP sockets of each rank listen."""
    return sorted(int(count) for count in re.findall(r"listening (\d+)", mpi.run(3, PROGRAM, *arguments).check().out))


def test_a_job_has_no_listening_socket_that_mpi_alone_has_not(mpi):
    bare = listening(mpi, "bare")
    assert len(bare) == 3
    assert listening(mpi, "hvdlite") == bare


def test_a_listening_socket_would_be_found(openmpi):
    assert sum(listening(openmpi, "hvdlite", "ours")) == sum(listening(openmpi, "bare")) + 3
