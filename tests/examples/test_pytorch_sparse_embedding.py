"""The sparse table: few of its rows travel, and a rank without words keeps up with the others."""

from __future__ import annotations

import re

import pytest


@pytest.mark.mpi
@pytest.mark.slow
def test_it_learns_although_ranks_are_without_words_at_times(run_example):
    out = run_example("pytorch_sparse_embedding.py", 3, "--epochs", 2)
    found = re.fullmatch(
        r"accuracy (\d+\.\d) %, at most (\d+) of 32768 rows in a step, steps without words on each rank: (.+)\n", out
    )
    assert found, out
    assert float(found[1]) > 85
    assert 100 < int(found[2]) < 1000
    assert found[3] == "[0, 2, 2]"  # the last batch of each epoch is one line, of rank 0
