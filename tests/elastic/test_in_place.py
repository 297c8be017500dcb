"""Ranks that are killed under an MPI that goes on without them: so does the training, in the same processes."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 9
TOLERANT = ("--with-ft", "ulfm")

pytestmark = pytest.mark.mpi


@pytest.fixture
def environ(tmp_path):
    """Settings of a job that goes on in place, with a place of its own for what the ranks of the host share."""
    (tmp_path / "shared").mkdir()
    return {"HVDLITE_ELASTIC_IN_PLACE": "1", "HVDLITE_SHARED_MEMORY_DIR": str(tmp_path / "shared")}


def undisturbed() -> int:
    value = 0
    for step in range(STEPS):
        value = value * 3 + step
    return value


@pytest.mark.parametrize(
    ("dead", "moment"),
    [([2], "collective"), ([0, 3], "collective"), ([0], "commit"), ([1, 0], "recovery"), ([3, 1, 0], "recovery")],
)
def test_the_others_go_on_from_the_last_commit(openmpi, tmp_path, environ, dead, moment):
    program = (PROGRAMS / "in_place.py", STEPS, ",".join(map(str, dead)), moment)
    ended = openmpi.run(4, *program, env=environ, options=TOLERANT)
    assert ended.out == f"done {[(rank, undisturbed()) for rank in range(4) if rank not in dead]}\n", ended.err
    assert "goes on in place" in ended.err
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize("dead", [[1], [0, 2]])
def test_ranks_that_die_in_backward_cost_no_sample(openmpi, tmp_path, environ, dead):
    ended = openmpi.run(
        4, PROGRAMS / "in_place_torch.py", ",".join(map(str, dead)), env=environ, options=TOLERANT, timeout=120
    )
    assert ended.out == f"{4 - len(dead)} ranks, 1 model\nevery sample once\n", ended.err
    assert list((tmp_path / "shared").iterdir()) == []


def test_with_too_few_ranks_left_the_job_ends(openmpi, environ):
    few = environ | {"HVDLITE_ELASTIC_MIN_NP": "4"}
    ended = openmpi.run(4, PROGRAMS / "in_place.py", STEPS, 2, "collective", env=few, options=TOLERANT)
    assert ended.code != 0
    assert "3 are left, fewer than HVDLITE_ELASTIC_MIN_NP=4" in ended.err
    assert "done" not in ended.out


def test_a_rank_that_does_not_come_back_ends_the_job(openmpi, environ):
    hasty = environ | {"HVDLITE_ELASTIC_IN_PLACE_TIMEOUT": "1"}
    ended = openmpi.run(4, PROGRAMS / "in_place.py", STEPS, 2, "stuck", env=hasty, options=TOLERANT)
    assert ended.code != 0
    assert "rank 2 of 4 died or cannot be reached, and training did not go on within 1 s" in ended.err


def test_without_the_setting_a_lost_rank_ends_the_job(openmpi):
    ended = openmpi.run(4, PROGRAMS / "in_place.py", STEPS, 2, "collective", options=TOLERANT)
    assert ended.code != 0
    assert "failed, so all ranks end now. Cause: " in ended.err
    assert "done" not in ended.out


def test_mpi_without_fault_tolerance_is_told(mpi, environ):
    ended = mpi.run(2, PROGRAMS / "in_place.py", STEPS, 9, "never", env=environ).check()
    assert ended.out == f"done {[(rank, undisturbed()) for rank in range(2)]}\n"
    assert ended.err.count("cannot go on in place when ranks are lost") == 1
