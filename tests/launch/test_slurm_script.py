"""Batch scripts, compared as a whole with the files in scripts/. They run on a real Slurm in tests/slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.launch import cli
from hvdlite.launch.job import Job
from hvdlite.launch.slurm_script import Batch, render

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = ("python", "train.py", "--note", "it's two words")
PAST_A_NODE = Job(command=TRAIN, ranks=8, exports=("A=b c", "TOKEN"))
FULL = Batch(nodes=2, cpus=6, gpus=4, time="1-00:30", partition="gpu", account="ai", output="%j.txt", requeue=120)

CASES = {
    "small": (Job(command=TRAIN, ranks=2), Batch(), "pmix"),
    "uneven": (Job(command=TRAIN, ranks=3), Batch(nodes=2, time="10"), "pmix"),
    "mpich": (Job(command=TRAIN, ranks=4), Batch(nodes=2, cpus=2, output="out-%j.txt"), "pmi2"),
    "full": (PAST_A_NODE, FULL, "pmix"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_that_of_the_file(name):
    assert render(*CASES[name], "/opt/my env/bin", {}) == (SCRIPTS / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", CASES)
def test_bash_reads_the_script(name):
    subprocess.run(["bash", "-n", SCRIPTS / f"{name}.sbatch"], check=True, timeout=10)


def test_every_file_is_compared():
    assert {path.stem for path in SCRIPTS.iterdir()} == set(CASES)


def test_all_faults_are_said_at_once_with_those_of_the_job(capsys):
    options = ["-N", "0", "--cpus-per-task", "-1", "--time", "an hour", "--requeue", "0", "--account", "a b"]
    others = ["-np", "2", "-H", "a:2", "-p", "22", "--launcher", "mpirun", "-x", "1=2", "--cache-capacity", "x"]
    assert cli.main(["--slurm-script", "-", *options, *others]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    for fault in ("--nodes: 0", "--cpus-per-task: -1", "--time: 'an hour'", "--requeue: 0", "--account: 'a b'",
                  "-H, --hostfile: Slurm chooses", "--ssh-port, ", "--launcher mpirun: ", "-x: '1=2'",
                  "--cache-capacity: ", "command: no command"):  # fmt: skip
        assert f"\n  {fault}" in said.err


def test_a_new_start_needs_a_limit_to_count_from():
    assert Batch(requeue=60).faults(1) == ["--requeue: needs --time, for it counts from the limit"]


@pytest.mark.parametrize("time", ["90", "5:30", "1:00:00", "2-0", "2-12:00", "1-0:0:1"])
def test_times_are_those_of_slurm(time):
    assert Batch(time=time).faults(1) == []


@pytest.mark.parametrize("option", ["--slurm-script", "--kubernetes-manifest"])
def test_an_empty_name_of_a_file_starts_no_job(option, capsys):
    with pytest.raises(SystemExit) as ended:  # as `hvdrun --slurm-script "$SCRIPT" …` may say it
        cli.main(["-np", "2", option, "", "true"])
    assert ended.value.code == 2
    assert f"argument {option}: the name of the file is empty" in capsys.readouterr().err


def test_names_and_values_reach_the_program_as_they_are(tmp_path):
    arguments = ["two words", 'it\'s "q"', "$HOME", "`ls`", "ü*", "", "two\nlines"]
    show = "import os, sys; print([os.environ['A'], *sys.argv[1:]])"
    path = tmp_path / "a 'job' $x.sbatch"
    command = [sys.executable, "-c", show, *arguments]
    assert cli.main(["-np", "1", "-x", "A=b c'$HOME\nd", "--slurm-script", str(path), *command]) == 0
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nwhile [ "$1" != -c ]; do p=$1; shift; done; exec "$p" "$@"\n')
    srun.chmod(0o755)
    script = path.read_text().replace("exec srun", f"exec {srun}")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.stdout == f"{['b c' + chr(39) + '$HOME' + chr(10) + 'd', *arguments]}\n", done.stderr


def test_a_node_without_a_rank_is_refused():
    (fault,) = Batch(nodes=3).faults(2)
    assert "2 ranks on 3 nodes" in fault


def test_an_allocation_that_hvdrun_runs_in_says_nothing_of_the_job_to_come(monkeypatch, capsys):
    for name, value in (("JOB_ID", "1"), ("NTASKS", "7"), ("JOB_NODELIST", "a"), ("TASKS_PER_NODE", "7")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "7")  # each task may write a script of its own
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "5")
    assert cli.main(["-np", "9", "--slurm-script", "-", "x"]) == 0
    script = capsys.readouterr().out
    assert "--ntasks=9 " in script and "SRUN_CPUS" not in script
    assert cli.main(["--slurm-script", "-", "x"]) == 2
    assert "-np: how many ranks?" in capsys.readouterr().err


def test_hvdrun_writes_it_and_starts_nothing(tmp_path, capsys):
    path = tmp_path / "job.sbatch"
    arguments = ["-np", "4", "-N", "2", "--time", "5", "--slurm-script", str(path), "no-such-program", "x"]
    assert cli.main(arguments) == 0
    assert "#SBATCH --ntasks-per-node=2\n#SBATCH --time=5\n" in path.read_text()
    assert path.read_text().endswith(
        "exec srun --mpi=pmix --ntasks=4 --kill-on-bad-exit=1 --cpu-bind=none no-such-program x\n"
    )
    assert capsys.readouterr().out == ""


def test_hvdrun_prints_it(capsys):
    assert cli.main(["-np", "2", "--as-horovod", "--slurm-script", "-", "x"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n#SBATCH --nodes=1\n")
    assert "\nexport PYTHONPATH=" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--time", "5"], "--time: for a batch script. Add --slurm-script FILE"),
        (["--slurm-script", "/nowhere/job"], "cannot write /nowhere/job: "),
        (["--slurm-script", "-", "-N", "0"], "--nodes: 0, expected a whole number, 1 or more"),
    ],
)
def test_mistakes_are_one_message(arguments, message, capsys):
    assert cli.main(["-np", "2", *arguments, "x"]) == 2
    assert message in capsys.readouterr().err
