"""One Slurm for all tests of this folder; each test has to leave its nodes empty."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def cluster_module() -> Any:
    """The module that makes clusters. Where it cannot, tests are skipped, but in CI they fail."""
    spec = importlib.util.spec_from_file_location("slurm_cluster", HERE / "cluster.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if problem := module.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no Slurm here: {problem}")
    return module


@pytest.fixture(scope="session")
def running_cluster(cluster_module: Any) -> Iterator[Any]:
    with cluster_module.Cluster(3) as cluster:
        yield cluster


@pytest.fixture(scope="session", autouse=True)
def job_with_a_limit(running_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A job aside, and its output, that meets its time limit while other tests run: Slurm looks every 30 seconds."""
    output = tmp_path_factory.mktemp("limit") / "output"
    report = HERE / "programs" / "report.py"
    wrap = (
        "scontrol update JobId=$SLURM_JOB_ID EndTime=now+15seconds\n"  # a limit is a minute at least
        "exec srun --mpi=pmix " + shlex.join([sys.executable, str(report), "wait", f"{output}.up"])
    )
    options = ["--partition=aside", "--ntasks=2", "--time=1", f"--output={output}", "--wrap", wrap]
    done = running_cluster.run("sbatch", "--parsable", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), output


@pytest.fixture
def slurm(running_cluster: Any) -> Iterator[Any]:
    """Slurm with nodes n1 and n2 of 4 CPUs. Fails a test whose job leaves a process behind, or shared memory."""
    yield running_cluster
    deadline = time.monotonic() + 10
    while (left := running_cluster.processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"still running on the nodes: {left}"
    assert not running_cluster.files()


@pytest.fixture
def submit(slurm: Any, tmp_path: Path) -> Callable[..., str]:
    """`submit(*options, wrap=command)` or `submit(*options, script)` runs sbatch; returns the id of the job."""

    def submit(*arguments: Any, wrap: str | None = None) -> str:
        wrapped = [] if wrap is None else ["--wrap", wrap]
        done = slurm.run("sbatch", "--parsable", *wrapped, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        job: str = done.stdout.strip()
        return job

    return submit


@pytest.fixture
def report() -> Path:
    """A program that says where each rank is, and does a little more when told."""
    return HERE / "programs" / "report.py"
