"""The examples with TensorFlow's own loop: a dense network, and a table of which few rows travel."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def test_digits_are_told_apart(run_example):
    found = re.fullmatch(r"loss (\d\.\d+)\naccuracy (\d+\.\d) %\n", run_example("tensorflow_digits.py", 2))
    assert float(found[1]) < 0.1
    assert float(found[2]) > 95


def test_ranks_learn_one_table_from_the_same_rows_as_one_process(run_example):
    pattern = r"loss \d\.\d+, accuracy (\d+\.\d) % \(guessing (\d+\.\d) %\), (\d+) of 32768 rows in a step\n"
    alone, together = (
        re.fullmatch(pattern, run_example("tensorflow_embedding.py", size, "--epochs", 2)) for size in (1, 2)
    )
    assert alone.groups() == together.groups()
    assert float(together[1]) > float(together[2]) + 5
    assert int(together[3]) == 64  # those of all ranks' words
