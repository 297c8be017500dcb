"""Gradient accumulation: the weights of the whole batch, whoever counts the passes, also after a partial last batch."""

from __future__ import annotations

import re

import pytest


@pytest.mark.mpi
@pytest.mark.slow
def test_accumulating_gives_the_weights_of_whole_batches(run_example):
    # 719 images per rank are 90 pieces, so the last batch has 2 of 4, the last of which is smaller.
    out = run_example("pytorch_accumulation.py", 2, "--epochs", 3)
    found = re.fullmatch(
        r"accuracy (\d+\.\d) % with whole batches\n"
        r"backward_passes_per_step=4: weights differ by (\S+) at most\n"
        r"no_sync\(\): weights differ by (\S+) at most\n",
        out,
    )
    assert found, out
    accuracy, by_count, by_hand = map(float, found.groups())
    assert accuracy > 85
    assert by_count < 1e-10
    assert by_hand < 1e-10
