"""Batch scripts with mpirun and hvdrun, which find the nodes of the job by themselves."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent

LAUNCHERS = {
    "mpirun": (f"{BIN}/mpirun", "--bind-to", "none", f"{BIN}/python"),
    "hvdrun": (f"{BIN}/hvdrun", "--no-label", "python"),
    "hvdrun over srun": (f"{BIN}/hvdrun", "--no-label", "--launcher", "srun", "python"),
}


def exec_of(*command):
    return f"exec {shlex.join(map(str, command))}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_in_a_batch_script_uses_its_nodes(slurm, submit, report, tmp_path, launcher):
    job = submit("-N2", "--ntasks-per-node=2", "-o", "job-%j.txt", wrap=exec_of(*LAUNCHERS[launcher], report))
    state = slurm.wait_for(job, ["COMPLETED", "FAILED"], timeout=60)["JobState"]
    said = (tmp_path / f"job-{job}.txt").read_text()
    assert state == "COMPLETED", said
    where = sorted(line.split()[1] + " " + line.split()[-1] for line in said.splitlines() if line.startswith("rank "))
    assert where == ["0/4 n1", "1/4 n1", "2/4 n2", "3/4 n2"]


def test_the_exit_code_of_a_rank_becomes_that_of_the_batch_job(slurm, submit, report):
    job = submit("-N2", "--ntasks-per-node=1", "-o", "/dev/null", wrap=exec_of(*LAUNCHERS["mpirun"], report, "exit", 3))
    assert slurm.wait_for(job, ["COMPLETED", "FAILED"], timeout=60)["ExitCode"] == "3:0"
