"""The learned schedule over real MPI processes, in shared memory and with messages."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "scheduled.py"
STEPS = 120

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("size", "n_hosts"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_steps_that_repeat_are_scheduled_and_right(mpi, size, n_hosts):
    ended = mpi.run(size, PROGRAM, n_hosts, STEPS).check()
    assert ended.err == ""
    assert STEPS // 2 <= int(ended.out) <= STEPS  # each of the ten interludes costs a step or two, rarely more


def test_without_it_the_results_are_the_same(mpi):
    ended = mpi.run(2, PROGRAM, 1, STEPS, env={"HVDLITE_LEARN_SCHEDULE": "0"}).check()
    assert ended.out == "0\n"
