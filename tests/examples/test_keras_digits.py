"""Keras with all callbacks, and Keras on torch."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 2])
def test_digits_are_learnt_with_all_callbacks(run_example, size):
    out = run_example("keras_digits.py", size, "--epochs", "4", "--min-accuracy", "85")
    assert out.count("finished gradual learning rate warmup") == 1
    assert len(re.findall(rf"accuracy \d+\.\d % over {size} rank", out)) == 1


@pytest.mark.mpi
def test_keras_on_torch_learns_digits(run_example):
    assert "over 2 ranks" in run_example("keras_torch_backend.py", 2, "--epochs", "4", "--min-accuracy", "85")
