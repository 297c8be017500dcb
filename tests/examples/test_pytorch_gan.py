"""The GAN: two optimizers side by side, whose parameters have the same names."""

from __future__ import annotations

import re

import pytest


@pytest.mark.mpi
@pytest.mark.slow
def test_it_learns_to_draw_points_like_the_real_ones(run_example):
    out = run_example("pytorch_gan.py", 2, "--steps", 300)
    found = re.fullmatch(
        r"distance between drawn and real points: (\d\.\d+) before, (\d\.\d+) after training\n",
        out,
    )
    assert found, out
    before, after = map(float, found.groups())
    assert before > 0.4
    assert after < 0.1
