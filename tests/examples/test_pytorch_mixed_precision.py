"""Mixed precision: scale, backward, unscale, clip, step, update, without a word to the other ranks in between."""

from __future__ import annotations

import re

import pytest


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "overflows"), [("bfloat16", False), ("float16", True)])
def test_it_learns_and_all_ranks_skip_the_same_steps(run_example, dtype, overflows):
    out = run_example("pytorch_mixed_precision.py", 2, "--dtype", dtype, "--epochs", 4)
    found = re.fullmatch(rf"accuracy (\d+\.\d) % in {dtype}, skipped steps on each rank: \[(\d+), (\d+)\]\n", out)
    assert found, out
    assert float(found[1]) > 85
    assert found[2] == found[3]
    assert (int(found[2]) > 0) is overflows
