"""Every command in the pages about launching runs as it stands, or is named here with what stands for it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/launching.md", "docs/migrating.md", "docs/quickstart.md")
TRAIN = "import hvdlite as hvd\nhvd.init()\nprint('rank', hvd.rank(), 'of', hvd.size())\n"

# What is not run here: which test runs it, or why none can.
ELSEWHERE = {
    "make demo": "tests/examples/test_pytorch_digits.py",
    "make test": "this is it",
    "make wheel": "needs docker, which no test has",
    "pip install": "tests/project/test_wheel.py",
    "export ": "set for the commands below it",
    "/usr/bin/mpirun": "tests/launch/test_two_mpis.py",
    "sbatch ": "tests/slurm/test_scripts.py",
    "hvdrun --kubernetes-manifest": "tests/launch/test_kubernetes.py",
    "kubectl ": "needs a cluster, which no test has",
    "hvdrun doctor": "tests/launch/test_doctor.py",
    "hvdrun --check-build": "tests/launch/test_doctor.py",
}
SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4"}


def documented():
    """Return the commands after a prompt in the pages, without what follows as a comment."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    found.append(" ".join(shlex.split(line[2:], comments=True)))
    return sorted(set(found))


COMMANDS = documented()
RUN = [command for command in COMMANDS if not command.startswith(tuple(ELSEWHERE))]


@pytest.fixture
def user(openmpi, tmp_path):
    """Run what a user types who works in an environment, where `train.py` is."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("node1 slots=4\nnode2 slots=4\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(TRAIN)
    foreign = ("HVDLITE_", "OMPI_", "PMIX_", "PRTE_", "SLURM_")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    environ["PATH"] = f"{openmpi.python.parent}:{environ['PATH']}"
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"  # as if there were a core for each rank

    def run(words, **more):
        done = subprocess.run(
            words, cwd=tmp_path, env={**environ, **more}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("command", RUN)
def test_it_does_what_the_page_says(user, tmp_path, command):
    words = shlex.split(command)
    if {"-H", "--hostfile"} & set(words):  # those hosts are not there; tests/hosts has some
        assert " --host " in user([words[0], "--print-command", *words[1:]])
        return
    if command == "hvdrun python train.py":
        assert " -np 4 " in user([words[0], "--print-command", *words[1:]], **SLURM)
        return
    said = user(words)
    if "--print-command" in words:
        assert said.rstrip().endswith("python train.py")
    elif "--slurm-script" in words:
        assert "srun " in (tmp_path / "job.sbatch").read_text()
    else:
        asked = re.search(r"-np (\d+)", command)
        size = int(asked[1]) if asked else 1
        said += "".join(file.read_text() for file in tmp_path.glob("logs/*/stdout"))
        assert sorted(re.findall(r"rank (\d+) of (\d+)", said)) == [(str(rank), str(size)) for rank in range(size)]


@pytest.mark.parametrize(("start", "where"), ELSEWHERE.items())
def test_what_is_not_run_here_is_in_the_pages_and_where_it_is_said_to_be(start, where):
    assert any(command.startswith(start) for command in COMMANDS)
    assert (ROOT / where).exists() or not where.startswith("tests/")


def test_srun_lines_are_those_that_run_under_slurm():
    page, tests = (ROOT / name for name in ("docs/launching.md", "tests/slurm/test_srun.py"))
    kinds = set(re.findall(r"`srun (--mpi=\w+) ", page.read_text()))
    assert kinds == {"--mpi=pmix", "--mpi=pmi2"}
    assert all(kind.removeprefix("--mpi=") in tests.read_text() for kind in kinds)
