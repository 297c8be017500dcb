"""The benchmarks run, and say what they promise. No figure is judged here: CI machines are noisy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.mpi


def test_the_allreduce_benchmark_compares_three_contenders(openmpi, tmp_path):
    figures = tmp_path / "figures.json"
    ended = openmpi.run(2, ROOT / "benchmarks" / "allreduce.py", "--quick", "--json", figures, timeout=110).check()
    results = json.loads(figures.read_text())["results"]
    sizes = ["1 KiB", "256 KiB", "4 MiB", "16 MiB", "64 MiB"]
    assert [r["case"] for r in results] == [*sizes, "ResNet-50 gradients", "ResNet-50 bfloat16"]
    assert [r["bytes"] for r in results[-2:]] == [4 * 25_557_032, 2 * 25_557_032]  # the published number of parameters
    for result in results:
        peers = {"gloo"} if result["case"] == "ResNet-50 bfloat16" else {"mpi", "gloo"}
        assert set(result["median_seconds"]) == {"hvdlite", *peers}
        assert result["times_as_fast_as"]["gloo"] == pytest.approx(
            result["median_seconds"]["gloo"] / result["median_seconds"]["hvdlite"]
        )
        assert result["case"] in ended.out


@pytest.mark.parametrize("size", [1, 2])
def test_the_training_benchmark_compares_with_ddp_and_with_no_communication(openmpi, tmp_path, size):
    figures = tmp_path / "figures.json"
    program = ROOT / "benchmarks" / "train.py"
    ended = openmpi.run(size, program, "--quick", "--json", figures, timeout=110).check()
    results = json.loads(figures.read_text())["results"]
    assert [(r["network"], r["parameters"]) for r in results] == [("conv 0.6M", 586_250), ("MLP 10M", 9_985_290)]
    for result in results:
        speeds = result["steps_per_second"]
        assert set(speeds) == {"hvdlite", "hvdlite views", "ddp", "none"}
        assert result["times_as_fast_as"]["ddp"] == pytest.approx(speeds["hvdlite"] / speeds["ddp"])
        assert f"{result['network']:<10} on {size}" in ended.out


def test_the_benchmark_of_tuning_compares_the_default_with_what_was_found(openmpi, tmp_path):
    figures = tmp_path / "figures.json"
    ended = openmpi.run(2, ROOT / "benchmarks" / "autotune.py", "--quick", "--json", figures, timeout=110).check()
    results = json.loads(figures.read_text())
    assert [r["case"] for r in results] == ["gradients", "training"]
    for result in results:
        assert set(result["median_seconds"]) == {"default", "tuned"}
        assert result["tuning"]["steps"] == 3
    assert ended.out.count("tuned is ") == 2
