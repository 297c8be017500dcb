"""The character-level GPT: the number of ranks changes its speed and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "pytorch_char_gpt.py"
PRINTED = re.compile(
    r"(step \d+/50, loss \d\.\d+\n){2}"
    r"(?P<after>\d\.\d+) bits per character of text it has not seen, (?P<before>\d\.\d+) by guessing\n"
    r"a line of its own: .{78}\n"
)

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.fixture(scope="module")
def loss_curve(run_example: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """`loss_curve(size)` returns the losses of 50 steps on so many ranks, after a look at what was printed."""

    def loss_curve(size: int) -> list[float]:
        losses = tmp_path_factory.mktemp("gpt") / "losses.json"
        options = "--dtype", "float64", "--steps", 50, "--batch-size", 12, "--losses", losses
        out = run_example("pytorch_char_gpt.py", size, *options)
        found = PRINTED.fullmatch(out)  # so rank 0 printed, and nobody else
        assert found, out
        assert float(found["after"]) < 0.65 * float(found["before"])
        curve: list[float] = json.loads(losses.read_text())
        return curve

    return loss_curve


@pytest.fixture(scope="module")
def curve_of_one_rank(loss_curve: Any) -> list[float]:
    curve: list[float] = loss_curve(1)
    return curve


def test_one_rank_learns(curve_of_one_rank):
    assert len(curve_of_one_rank) == 50
    assert curve_of_one_rank[-1] < 0.7 * curve_of_one_rank[0]


@pytest.mark.parametrize("size", [2, 3])
def test_more_ranks_have_the_loss_curve_of_one(loss_curve, curve_of_one_rank, size):
    # Rounding makes 1e-15. Gradients that are not those of all ranks make more than 1e-3 within a few steps.
    assert loss_curve(size) == pytest.approx(curve_of_one_rank, abs=1e-5, rel=0)


def test_a_batch_that_cannot_be_shared_out_is_refused(openmpi):
    ended = openmpi.run(2, EXAMPLE, "--batch-size", 7)
    assert ended.code != 0
    assert "--batch-size 7 is not a multiple of 2, the number of ranks" in ended.err
