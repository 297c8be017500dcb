"""The communicator over real MPI processes, with each MPI library."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"
PYTEST = ["-m", "pytest", "-p", "hvdlite.testing.lockstep", "-p", "no:cacheprovider", "--color=no", "-q", "-x"]

MEMORY = "HVDLITE_TEST_MEMORY"  # where tests/conformance/conftest.py lets segments be made

pytestmark = pytest.mark.mpi


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 4, 7])
def test_mpi_keeps_the_contract(mpi, size, short_tmpdir):
    memory = tempfile.mkdtemp(prefix="hvdlite-test-", dir="/dev/shm")
    contract = TESTS / "conformance" / "test_communicator.py"
    # In the job of 7, groups of 1, 2, 3 and 4 of its ranks have their turn too; 4 ranks alone are only themselves.
    which = ["-k", "4ranks"] if size == 4 else []
    try:
        mpi.run(size, *PYTEST, contract, *which, env={MEMORY: memory}, timeout=240, tmpdir=short_tmpdir).check()
        assert os.listdir(memory) == []
    finally:
        shutil.rmtree(memory)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3])
def test_every_backend_is_right_over_mpi(mpi, size):
    backends = TESTS / "conformance" / "test_backends.py"
    mpi.run(size, *PYTEST, backends, "-k", "not layout", timeout=280).check()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [2, 3])
def test_what_only_mpi_has_works(mpi, size):
    mpi.run(size, *PYTEST, TESTS / "mpi" / "in_step", timeout=150).check()


@pytest.mark.parametrize("who", ["program", "nobody"])
def test_mpi_belongs_to_who_started_it(mpi, who):
    ended = mpi.run(2, PROGRAMS / "own_mpi.py", who).check()
    assert ended.out.count("done") == 2


def test_an_abort_ends_all_ranks_with_its_code(mpi):
    ended = mpi.run(4, PROGRAMS / "abort.py", timeout=30)
    assert ended.code == 7
    assert "survived" not in ended.out


def test_nothing_is_left_after_kill_9(mpi, short_tmpdir):
    memory = tempfile.mkdtemp(prefix="hvdlite-test-", dir="/dev/shm")
    options = ["--oversubscribe", "--bind-to", "none"] if mpi.name == "openmpi" else []
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = subprocess.Popen(
        [mpi.mpirun, *options, "-n", "3", mpi.python, PROGRAMS / "leave_nothing.py", memory],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **as_root, "TMPDIR": short_tmpdir},
        start_new_session=True,
    )
    try:
        pids = [int(text) for text in job.stdout.readline().split()]
        assert len(pids) == 3
        assert os.listdir(memory) == []  # already while they run
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        job.communicate(timeout=30)
        assert os.listdir(memory) == []
        assert [name for name in os.listdir(short_tmpdir) if name.startswith("hvdlite")] == []
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
        shutil.rmtree(memory)
    assert job.returncode != 0
