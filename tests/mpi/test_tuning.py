"""Tuning, cores and the summary over real MPI processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
CORES = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.mpi


def test_a_job_tunes_and_the_next_one_starts_with_what_it_found(mpi, tmp_path):
    path, log = tmp_path / "tuned.json", tmp_path / "log.csv"
    env = {
        "HOROVOD_AUTOTUNE": "1", "HVDLITE_AUTOTUNE_FILE": str(path), "HOROVOD_AUTOTUNE_LOG": str(log),
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2", "HVDLITE_LOG_LEVEL": "info", "HVDLITE_SUMMARY": "1",
    }  # fmt: skip
    ended = mpi.run(2, PROGRAMS / "tuned.py", path, 2000, env=env).check()
    assert "INFO hvdlite[rank 0]: autotune settled on " in ended.err
    assert ended.err.count("hvdlite summary: 2 ranks, ") == 1
    found = json.loads(path.read_text())
    assert found["valid_for"]["ranks_per_host"] == [2]
    assert log.read_text().splitlines()[-1].endswith(",best")

    found["knobs"]["fusion_threshold"] = 0  # then every tensor goes alone
    path.write_text(json.dumps(found))
    ended = mpi.run(2, PROGRAMS / "tuned.py", path, 10, env={"HVDLITE_AUTOTUNE_FILE": str(path)}).check()
    assert ended.err == ""
    ended = mpi.run(3, PROGRAMS / "tuned.py", path, 10, env={"HVDLITE_AUTOTUNE_FILE": str(path)}).check()
    (line,) = ended.err.splitlines()
    assert "WARNING hvdlite[rank 0]" in line
    assert "ranks: 2 there, 3 here" in line


# Cores. Binding is done in the ranks, as CI machines bind in many ways.


def run_bound(mpi, *cores, **env):
    ended = mpi.run(len(cores), PROGRAMS / "bound.py", *cores, env=env).check()
    assert ended.out.split() == ["total", str(200 * len(cores) * (len(cores) + 1) // 2)] * len(cores)
    return ended.err.splitlines()


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores: with one, nothing can be bound wrongly")
def test_ranks_on_one_core_are_named_once_with_the_remedy(mpi):
    (line,) = run_bound(mpi, CORES[0], CORES[0])
    assert f"WARNING hvdlite[rank 0]: ranks 0, 1 are bound to the same core {CORES[0]} of " in line
    assert "mpirun --bind-to none" in line


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores: with one, nothing can be bound wrongly")
def test_a_rank_with_one_core_of_several_is_named_once_with_the_remedy(openmpi):
    (line,) = run_bound(openmpi, CORES[0], CORES[1])
    assert "WARNING hvdlite[rank 0]: ranks 0, 1 may use 1 of " in line
    assert "mpirun --bind-to none" in line


def test_cores_are_told_at_level_info_and_the_engine_goes_where_the_user_wants(openmpi):
    every = ",".join(map(str, CORES))
    first, last = CORES[0], CORES[-1]
    lines = run_bound(openmpi, every, every, HVDLITE_LOG_LEVEL="info", HOROVOD_THREAD_AFFINITY=f"{first},{last}")
    for rank, core in enumerate((first, last)):
        (line,) = [line for line in lines if f"INFO hvdlite[rank {rank}]" in line]
        assert f"the engine's thread may use core {core}, the program " in line


def test_an_affinity_that_does_not_fit_is_an_error_and_training_goes_on(openmpi):
    every = ",".join(map(str, CORES))
    lines = run_bound(openmpi, every, every, HVDLITE_THREAD_AFFINITY=str(CORES[0]))
    (line,) = lines
    assert f"ERROR hvdlite[rank 1]: HVDLITE_THREAD_AFFINITY={CORES[0]} does not fit local rank 1" in line
