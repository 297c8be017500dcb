"""Starts of an elastic job by a real mpirun: each goes on from the commits of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

TRAIN = Path(__file__).parent / "programs" / "train.py"
STEPS = 9

pytestmark = pytest.mark.mpi


def undisturbed() -> int:
    value = 0
    for step in range(STEPS):
        value = value * 3 + step
    return value


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_after_a_killed_rank_the_next_start_goes_on(mpi, tmp_path, before, after):
    environ = {"HVDLITE_ELASTIC_DIR": str(tmp_path)}
    first = mpi.run(before, TRAIN, STEPS, "KILL", env=environ)
    assert first.code != 0
    assert "done" not in first.out
    second = mpi.run(after, TRAIN, STEPS, "KILL", env=environ).check()
    assert second.out == f"done {[(5, undisturbed(), after)] * after}\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"commit-{STEPS - 1}", f"commit-{STEPS}"]


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_after_a_signal_the_ranks_commit_and_leave(mpi, tmp_path, name):
    environ = {"HVDLITE_ELASTIC_DIR": str(tmp_path)}
    first = mpi.run(2, TRAIN, STEPS, name, env=environ).check()
    assert first.out == ""
    second = mpi.run(2, TRAIN, STEPS, name, env=environ).check()
    assert second.out == f"done {[(6, undisturbed(), 2)] * 2}\n"
