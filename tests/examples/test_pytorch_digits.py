"""The example of the README, in the ways that the README shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pytorch_digits.py"
FEWER = ["--epochs", "6", "--min-accuracy", "93"]
SUMMARY = re.compile(
    r"accuracy (\d+\.\d) %, \d+ samples/s over (\d) ranks?, waited \d+ % of the time for communication\n"
)


def check_summary(ended, size):
    """Check that rank 0, and only it, said how it went."""
    ended.check()
    (found,) = SUMMARY.findall(ended.out)
    assert int(found[1]) == size
    assert float(found[0]) >= 93
    assert ended.err.count("epoch 6/6") >= 1  # the progress bar
    assert "Error" not in ended.err


@pytest.mark.mpi
@pytest.mark.slow
def test_it_learns_under_hvdrun(openmpi):
    hvdrun = Path(sys.executable).parent / "hvdrun"
    check_summary(openmpi.run_alone(hvdrun, "-np", "2", "python", EXAMPLE, *FEWER, timeout=100), 2)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_it_learns_under_mpirun(openmpi, size):
    check_summary(openmpi.run(size, EXAMPLE, *FEWER, timeout=100), size)


@pytest.mark.slow
def test_it_learns_alone(openmpi):
    check_summary(openmpi.run_alone(EXAMPLE, *FEWER, timeout=100), 1)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_low_accuracy_ends_with_an_error(openmpi):
    ended = openmpi.run(2, EXAMPLE, "--epochs", "1", "--min-accuracy", "99.9")
    assert ended.code != 0
    assert SUMMARY.search(ended.out)
