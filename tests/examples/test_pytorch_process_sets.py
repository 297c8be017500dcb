"""The process sets: each half of the ranks trains a model of its own, and all vote."""

from __future__ import annotations

import re

import pytest


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("size", "ranks_of_half"), [(1, [1]), (2, [1, 1]), (3, [2, 1])])
def test_each_half_learns_and_all_vote(run_example, size, ranks_of_half):
    out = run_example("pytorch_process_sets.py", size, "--epochs", 3)
    kinds = "convolutional", "plain"
    halves = "".join(
        rf"{kind} network on {n} of {size} ranks: (\d+\.\d) %\n" for kind, n in zip(kinds, ranks_of_half, strict=False)
    )
    found = re.fullmatch(halves + r"their vote: (\d+\.\d) %\n", out)
    assert found, out
    *alone, together = map(float, found.groups())
    assert min(alone) > 85
    assert together >= min(alone)
