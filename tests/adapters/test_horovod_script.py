"""A script for Horovod, which knows nothing of hvdlite, runs unchanged: alone, under mpirun, and under hvdrun."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "programs" / "horovod_train.py"
AS_HOROVOD = ["-m", "hvdlite.as_horovod", SCRIPT]
ENVIRON = {"OMP_NUM_THREADS": "1"}  # ranks outnumber the cores already

pytestmark = pytest.mark.mpi


def loss(out: str, size: int) -> float:
    found = re.fullmatch(rf"horovod_train\.py 0\.28\.1: {size} ranks, loss (\S+)\n", out)
    assert found, out
    return float(found[1])


def test_it_trains_under_mpirun(openmpi):
    ended = openmpi.run(3, *AS_HOROVOD, "--compress", env=ENVIRON).check()
    assert loss(ended.out, 3) < 0.3
    assert ended.err == ""


def test_it_trains_alone_with_workers_that_import_it_anew(openmpi):
    ended = openmpi.run_alone(*AS_HOROVOD, "--workers", "1", "--epochs", "2", env=ENVIRON).check()
    assert loss(ended.out, 1) < 10
    assert ended.err == ""


def test_it_trains_under_hvdrun_with_workers(openmpi):
    environ = {**os.environ, **ENVIRON, "PATH": "/usr/bin:/bin"}
    command = [openmpi.python, "-m", "hvdlite.launch", "-np", "2", "--as-horovod", "--no-label", "python", SCRIPT]
    done = subprocess.run(
        [*command, "--workers", "1", "--epochs", "2"],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert loss(done.stdout, 2) < 10


def test_its_own_mistake_ends_the_job_with_its_traceback_only(openmpi):
    ended = openmpi.run(2, *AS_HOROVOD, "--epochs", "1", "--fail", env=ENVIRON)
    assert ended.code == 1
    assert "ValueError: the script's own mistake" in ended.err
    assert "rank 1 of 2 failed, so all ranks end now" in ended.err
    assert "runpy" not in ended.err
    assert "as_horovod" not in ended.err
