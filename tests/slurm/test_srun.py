"""Jobs that srun starts: every task becomes a rank, or init() says why not; and how jobs end."""

from __future__ import annotations

import re
import shlex
import sys
import time

import pytest


def ranks(text: str) -> list[str]:
    """Return what the ranks said, in the order of ranks."""
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


TWO_AND_TWO = [
    "rank 0/4 local 0/2 cross 0/2 on n1",
    "rank 1/4 local 1/2 cross 0/2 on n1",
    "rank 2/4 local 0/2 cross 1/2 on n2",
    "rank 3/4 local 1/2 cross 1/2 on n2",
]


@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_two_nodes_with_two_tasks_each(slurm, flavour, request, report):
    kind = {"openmpi": "pmix", "mpich": "pmi2"}[flavour]
    python = request.getfixturevalue(flavour).python
    done = slurm.run("srun", f"--mpi={kind}", "-N2", "--ntasks-per-node=2", python, report)
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout) == TWO_AND_TWO


def test_nodes_may_have_different_numbers_of_tasks(slurm, report, tmp_path):
    (tmp_path / "hosts").write_text("n1\nn2\nn2\nn2\n")  # srun puts a task where each line says
    env = {"SLURM_HOSTFILE": str(tmp_path / "hosts")}
    done = slurm.run("srun", "--mpi=pmix", "-n4", "--distribution=arbitrary", sys.executable, report, env=env)
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout) == [
        "rank 0/4 local 0/1 cross 0/2 on n1",
        "rank 1/4 local 0/3 cross 1/2 on n2",
        "rank 2/4 local 1/3 cross 0/1 on n2",
        "rank 3/4 local 2/3 cross 0/1 on n2",
    ]


# Torch without CUDA sees no GPU: here those that Slurm gives count, and the one that is taken is said.
DEVICE = """
import os, torch, hvdlite.torch as hvd
seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: len(seen)
hvd.init()
print("rank", hvd.rank(), os.environ["SLURMD_NODENAME"], len(seen), seen[hvd.local_device().index], flush=True)
"""


@pytest.mark.parametrize(
    ("options", "n_seen"),
    [(["--gpus-per-node=2"], 2), (["--gpus-per-node=4"], 4), (["--gpus-per-task=1"], 1), (["--gpus-per-task=2"], 2)],
)
def test_ranks_of_a_node_take_a_gpu_each(slurm, options, n_seen):
    done = slurm.run("srun", "--mpi=pmix", "-N2", "--ntasks-per-node=2", *options, sys.executable, "-c", DEVICE)
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in ranks(done.stdout)]
    assert [(line[2], int(line[3])) for line in said] == [("n1", n_seen)] * 2 + [("n2", n_seen)] * 2
    assert len({(line[2], line[4]) for line in said}) == 4, done.stdout


@pytest.mark.parametrize(("flavour", "kind"), [("openmpi", "none"), ("openmpi", "pmi2"), ("mpich", "none")])
def test_the_wrong_kind_of_process_management_is_an_error(slurm, flavour, kind, request, report):
    python = request.getfixturevalue(flavour).python
    done = slurm.run("srun", f"--mpi={kind}", "-n2", python, report)
    assert done.returncode == 1, done.stderr
    assert not ranks(done.stdout)
    assert re.search(
        r"\w+=2 says that this job has 2 ranks, but .* gave this process a world of 1", done.stderr, re.DOTALL
    )
    assert "Under Slurm use 'srun --mpi=pmix' with Open MPI or 'srun --mpi=pmi2' with MPICH" in done.stderr


def test_a_rank_that_fails_ends_the_job_with_its_exit_code(slurm, report):
    done = slurm.run("srun", "--mpi=pmix", "-N2", "-n2", sys.executable, report, "exit", "3")
    assert done.returncode == 3, done.stderr


def test_with_mpich_the_exit_code_says_only_that_the_job_failed(slurm, mpich, report):
    # Its abort through pmi2 lets srun kill the tasks at once: 137, or what else they were ended by.
    done = slurm.run("srun", "--mpi=pmi2", "-N2", "-n2", mpich.python, report, "exit", "3")
    assert done.returncode != 0
    assert "application called MPI_Abort(" in done.stderr


def test_each_task_writes_into_its_own_file(slurm, report, tmp_path):
    done = slurm.run(
        "srun", "--mpi=pmix", "-N2", "-n2", "-o", "out-%j-%t.txt", sys.executable, report, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [re.sub(r"-\d+-", "-JOB-", name) for name in names] == ["out-JOB-0.txt", "out-JOB-1.txt"]
    assert [(tmp_path / name).read_text()[:8] for name in names] == ["rank 0/2", "rank 1/2"]


def test_a_job_that_is_cancelled_leaves_nothing(slurm, submit, report, tmp_path):
    command = "exec srun --mpi=pmix " + shlex.join([sys.executable, str(report), "wait", f"{tmp_path}/up"])
    job = submit("-N2", "--ntasks-per-node=2", "-o", "%j.out", wrap=command)
    while not (tmp_path / "up").exists():
        assert slurm.state(job)["JobState"] in ("PENDING", "RUNNING", "CONFIGURING"), slurm.logs()
        time.sleep(0.1)
    assert sum(name.startswith("python") for name in slurm.processes().values()) == 4
    assert slurm.run("scancel", job).returncode == 0
    slurm.wait_for(job, ["CANCELLED"])  # that nothing runs any more is for the fixture to find
