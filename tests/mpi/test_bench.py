"""`python -m hvdlite.bench` over a real MPI: each subcommand once, quickly. No figure is judged."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.mpi
BENCH = "-m", "hvdlite.bench"


def test_all_collectives_against_both_peers(openmpi, tmp_path):
    figures = tmp_path / "out.json"
    sizes = "--sizes", "1K", "--dtypes", "float32,bfloat16", "--seconds", "0.01", "--json", figures
    openmpi.run(2, *BENCH, "allreduce", "--all", "--vs", "mpi,gloo", *sizes).check()
    rows = json.loads(figures.read_text())["results"]
    assert [row["collective"] for row in rows[::2]] == [
        "allreduce",
        "allgather",
        "broadcast",
        "alltoall",
        "reducescatter",
    ]
    for row in rows:
        assert set(row["contenders"]) == {"hvdlite", "gloo", *(["mpi"] if row["dtype"] == "float32" else [])}
        assert row["missing"] == ({} if row["dtype"] == "float32" else {"mpi": "MPI has no bfloat16"})


def test_backends_follow_each_other_in_one_job(mpi, tmp_path):
    figures = tmp_path / "out.json"
    options = "--backends", "auto,ring,tree", "--sizes", "1K,64K", "--seconds", "0.01", "--json", figures
    ended = mpi.run(3, *BENCH, "allreduce", *options).check()
    rows = json.loads(figures.read_text())["results"]
    assert [row["backend"] for row in rows] == ["auto", "auto", "ring", "ring", "tree", "tree"]
    assert "tree was asked for" in ended.out


def test_it_starts_ranks_itself(openmpi, tmp_path):
    figures = tmp_path / "out.json"
    options = "-np", "2", "--sizes", "1K", "--seconds", "0.01", "--json", figures
    openmpi.run_alone(*BENCH, "allreduce", *options).check()
    assert json.loads(figures.read_text())["machine"]["ranks"] == 2


def test_a_step_is_recorded_replayed_and_scaled(openmpi, tmp_path):
    step, figures, machine = tmp_path / "step.json", tmp_path / "out.json", tmp_path / "machine.toml"
    openmpi.run_alone(*BENCH, "train", "--network", "conv4", "--batch", "4", "--record", step).check()
    assert len(json.loads(step.read_text())["gradients"]) == 6
    openmpi.run(2, *BENCH, "replay", step, "--repetitions", "3", "--json", figures).check()
    found = json.loads(figures.read_text())["results"]
    assert found["ranks"] == 2
    assert found["median"] >= found["computed"] > 0
    openmpi.run(2, *BENCH, "calibrate", "--output", machine).check()
    shown = openmpi.run_alone(*BENCH, "scale", step, "--cluster", machine, "--ranks", "2,8").check().out
    assert "links of 100 Gbit/s" in shown


def test_training_is_compared_with_ddp_and_none(openmpi, tmp_path):
    figures = tmp_path / "out.json"
    options = "--network", "mlp64,32,10", "conv4", "--batch", "4", "--repetitions", "2", "--json", figures
    openmpi.run(2, *BENCH, "train", *options).check()
    results = json.loads(figures.read_text())["results"]
    assert [result["network"] for result in results] == ["mlp64,32,10", "conv4"]
    for result in results:
        assert set(result["contenders"]) == {"hvdlite", "hvdlite views", "ddp", "none"}
        assert result["contenders"]["none"]["efficiency"] == 1
        assert result["contenders"]["hvdlite"]["reducing"] > 0
