"""The timeline over real MPI processes: while they run, at their end, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "recorded.py"

pytestmark = pytest.mark.mpi


def n_allreduces(path):
    return sum(event.get("name") == "ALLREDUCE" for event in json.loads(path.read_text()))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_environment_starts_a_timeline_that_is_complete_at_the_end(mpi, tmp_path, size):
    path = tmp_path / "t.json"
    env = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    ended = mpi.run(size, PROGRAM, "end", 20, path, env=env).check()
    assert ended.err == ""
    assert n_allreduces(path) == 20
    text = path.read_text()
    for word in ("NEGOTIATE_ALLREDUCE", "CYCLE_START", "start_time_since_epoch_in_micros", f'"{size - 1}"'):
        assert word in text


def test_the_file_can_be_read_while_the_job_runs(mpi, tmp_path):
    path = tmp_path / "t.json"
    ended = mpi.run(2, PROGRAM, "read while it runs", 30, path, env={"HVDLITE_TIMELINE": str(path)}).check()
    assert ended.out == "read 30\n"


def test_a_call_records_what_runs_before_the_next(mpi, tmp_path):
    path = tmp_path / "t.json"
    ended = mpi.run(2, PROGRAM, "by call", 9, path, env={"HOROVOD_TIMELINE": "DYNAMIC"}).check()
    assert ended.err == ""
    assert n_allreduces(path) == 9


@pytest.mark.parametrize("way", ["interrupt", "kill", "exit at once"])
def test_a_job_that_is_ended_leaves_valid_json(mpi, tmp_path, way):
    path = tmp_path / "t.json"
    ended = mpi.run(2, PROGRAM, way, 25, path, env={"HVDLITE_TIMELINE": str(path)})
    assert ended.code != 0
    assert n_allreduces(path) == 25


def test_every_rank_writes_a_file_where_the_name_has_the_rank(openmpi, tmp_path):
    openmpi.run(3, PROGRAM, "end", 4, tmp_path, env={"HVDLITE_TIMELINE": str(tmp_path / "t{rank}.json")}).check()
    assert [n_allreduces(tmp_path / f"t{rank}.json") for rank in range(3)] == [4, 4, 4]


def test_a_path_that_cannot_be_written_warns_once_and_training_goes_on(mpi, tmp_path):
    path = tmp_path / "missing" / "t.json"
    ended = mpi.run(3, PROGRAM, "end", 200, path, env={"HVDLITE_TIMELINE": str(path)}).check()
    assert ended.err.count("WARNING hvdlite[rank 0]: timeline") == 1
    assert len(ended.err.splitlines()) == 1
    assert str(path) in ended.err


@pytest.mark.parametrize("alone", [False, True])
def test_standard_output_gets_the_events(openmpi, tmp_path, alone):
    env = {"HVDLITE_TIMELINE": "/dev/stdout"}
    run = openmpi.run_alone if alone else lambda *rest, **more: openmpi.run(2, *rest, **more)
    ended = run(PROGRAM, "end", 5, tmp_path, env=env).check()
    assert sum(event.get("name") == "ALLREDUCE" for event in json.loads(ended.out)) == 5
