"""hvdlite.torch on processes that a real mpirun starts."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_end_with_the_same_weights(openmpi, size):
    ended = openmpi.run(size, PROGRAMS / "train_alike.py").check()
    assert f"{size} ranks, 1 results, mean of halves {(size + 1) / 2}" in ended.out
    assert ended.err == ""


def test_one_process_needs_no_mpirun(openmpi):
    ended = openmpi.run_alone(PROGRAMS / "train_alike.py").check()
    assert "1 ranks, 1 results, mean of halves 1.0" in ended.out
