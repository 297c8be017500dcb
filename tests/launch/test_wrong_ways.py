"""Wrong ways to start a job, as users take them: each ends by itself, says once what is wrong, and leaves nothing.

Hosts that are there and cannot take part are in tests/hosts, a real srun of the wrong type in tests/slurm.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi

LIMIT = 30.0  # seconds, promised to users for every one of these; all end much sooner
OF_RANK_1 = "import os\nif (os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('PMI_RANK')) == '1': "
FILES = {
    "late.py": f"import time\n{OF_RANK_1}print('loading', flush=True); time.sleep(100)\nimport train\n",
    "early.py": f"{OF_RANK_1}raise SystemExit\nimport train\n",
    "train.py": "import hvdlite\nhvdlite.init()\nprint('rank of', hvdlite.size())\n",
    "plain": "no program\n",
    "dead/ssh": "#!/bin/sh\necho 'the agent is gone' >&2\nexit 255\n",
    "no-interpreter": "#!/no/such/interpreter\n",
    "no-first-line": "true\n",
    "stale": "node1 slots=two\nlocalhost slots=1\nnode3 slot=4\na..b slots=1\n",
    "gone": "localhost slots=1\ngone.invalid slots=1  # sold\nalso-gone.invalid slots=1\n",
}
PROGRAMS = ("dead/ssh", "no-interpreter", "no-first-line")
HVDRUN = ("{python}", "-m", "hvdlite.launch")
OF_SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "4",
           "SLURM_STEP_NUM_TASKS": "4"}  # fmt: skip
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
REFUSED = 2  # exit code when nothing was started


@dataclass(frozen=True)
class Way:
    """A wrong way.

    Attributes:
        args: of hvdrun, or a whole command where `first` is empty.
        says: cause and remedy, both in the one message.
        code: the exit code; None: any but 0.
        first: what stands in front of `args`.
        environ: beside the usual; PATH is put in front of it. Names in braces are filled in, here and in `args`.
        mpis: over which MPI.
    """

    name: str
    args: tuple[str, ...]
    says: tuple[str, ...]
    code: int | None = REFUSED
    first: tuple[str, ...] = HVDRUN
    environ: dict[str, str] = field(default_factory=dict)
    mpis: tuple[str, ...] = ("openmpi",)


BOTH = ("openmpi", "mpich")
RAN = ("-np", "2", "{python}", "-c")

WAYS = [
    # What hvdrun refuses, before it starts anything.
    Way("more ranks than slots", ("-np", "3", "-H", "localhost:2", "true"),
        ("3 ranks on localhost:2, which take 2", "Ask for fewer, or give hosts more slots"), mpis=BOTH),
    Way("missing program", ("-np", "2", "no-such-program"),
        ("command 'no-such-program' is not a program", "Correct its name, or give its whole path")),
    Way("missing program on a named host that is this machine", ("-H", "localhost:2", "no-such-program"),
        ("command 'no-such-program' is not a program", "Correct its name")),
    Way("program that may not be run", ("-np", "2", "./plain"), ("file that may not be run", "chmod +x ./plain")),
    Way("script without python", ("-np", "2", "train.py"), ("is not a program", "Did you mean: python train.py?")),
    Way("folder for a program", ("-np", "2", "."), ("command '.' is not a program", "Correct its name")),
    Way("unknown host", ("-H", "localhost:1,gone.invalid:1", "true"),
        ("host gone.invalid: this name is not known here", "Correct it in -H or the host file"), mpis=BOTH),
    Way("name that cannot be one of a host", ("-H", "a..b:1", "true"), ("expected host:slots", "'a..b:1'")),
    Way("no ssh", ("-H", "gone.invalid:1", "true"), ("ssh cannot be run", "apt install openssh-client"),
        first=("{env}", "PATH={folder}", *HVDRUN)),
    Way("dead ssh", ("-H", "gone.invalid:1", "true"), ("ssh ended with 255 and said: the agent is gone", "Try: ssh "),
        environ={"PATH": "{folder}/dead"}, mpis=BOTH),
    Way("host file that is not there", ("--hostfile", "hosts", "-x", "a b", "true"),
        ("2 faults", "--hostfile: cannot read hosts", "Name a file with lines such as: node1 slots=4", "-x: 'a b'")),
    Way("host file with bad lines", ("--hostfile", "stale", "true"),
        ("3 faults", "stale, line 1: 'node1 slots=two'", "stale, line 3: 'node3 slot=4'", "line 4: 'a..b slots=1'",
         "such as node1:4")),
    Way("host file of hosts that are gone", ("--hostfile", "gone", "true"),
        ("hosts gone.invalid, also-gone.invalid: this name is not known here", "the host file")),
    Way("python of the other MPI by its path", ("-np", "2", "{other}", "train.py"),
        ("two MPIs", "{other}", "with {other_mpi} beside it", "that environment's own hvdrun"), mpis=BOTH),
    Way("python of the other MPI first on PATH", ("-np", "2", "python", "train.py"),
        ("two MPIs", "with {other_mpi} beside it", "that environment's own hvdrun"),
        environ={"PATH": "{other_bin}:{bin}"}, mpis=BOTH),
    Way("hvdrun under srun", ("-np", "2", "true"), ("hvdrun itself was started 4 times", "Start it once, without srun"),
        environ=OF_SRUN),
    Way("hvdrun under mpirun", ("-np", "2", "true"),
        ("hvdrun itself was started 2 times (OMPI_COMM_WORLD_SIZE=2)", "Start it once"),
        environ={"OMPI_COMM_WORLD_SIZE": "2"}),
    # What a rank does wrong.
    Way("program whose interpreter is missing", ("-np", "2", "./no-interpreter"),
        ("'./no-interpreter' cannot be run on", "correct its first line, whose interpreter (#!) is missing"), 127),
    Way("script without a first line", ("-np", "2", "./no-first-line"),
        ("'./no-first-line' cannot be run on", "needs a first line such as #!/bin/sh"), 127),
    Way("rank that fails before init", (*RAN, "import no_such_module"),
        ("ended with exit code 1; its last lines", "ModuleNotFoundError: No module named 'no_such_module'"), 1,
        mpis=BOTH),
    Way("rank that ends with 3", (*RAN, "raise SystemExit(3)"), ("of 2 on", "ended with exit code 3"), 3, mpis=BOTH),
    Way("rank that is killed", (*RAN, "import os; os.kill(os.getpid(), 9)"),
        ("was killed by signal 9 (SIGKILL)", "by hand or because the machine was out of memory"), 137, mpis=BOTH),
    Way("rank that does not come to init", ("-np", "3", "--start-timeout", "2", "{python}", "late.py"),
        ("rank 1 of 3 has not come to hvd.init(), and ranks 0, 2 wait there for 2 s: rank 1 still runs on",
         "its last lines: [1] loading"), 1, mpis=BOTH),
    Way("rank that ends without init", ("-np", "3", "{python}", "early.py"),
        ("rank 1 of 3 has not come to hvd.init(), which every rank has to call", "ended with exit code 0 without it"),
        1, mpis=BOTH),
    # Without hvdrun.
    Way("singleton under srun", ("{python}", "train.py"),
        ("SLURM_STEP_NUM_TASKS=4 says that this job has 4 ranks, but {mpi}", "use 'srun --mpi=pmix' with Open MPI"), 1,
        first=(), environ=OF_SRUN, mpis=BOTH),
    Way("ranks of Open MPI under MPICH's mpirun", ("{mpirun}", "-n", "2", "{other}", "train.py"),
        ("PMI_SIZE=2 says that MPICH's launcher started 2 ranks", "Use the mpirun of the same installation"), None,
        first=(), mpis=("mpich",)),
    Way("ranks of MPICH under Open MPI's mpirun", ("{mpirun}", "-n", "2", "--oversubscribe", "{other}", "train.py"),
        ("OMPI_COMM_WORLD_SIZE=2 says that Open MPI's launcher started 2 ranks, but mpi4py loads MPICH here",
         "Use the mpirun of the same installation"), None, first=()),
    Way("more ranks than cores under Open MPI's mpirun", ("{mpirun}", "-n", "4096", "{python}", "train.py"),
        ("not enough slots available", "OVERSUBSCRIBE"), None, first=()),  # the remedy is in docs/launching.md, too
]  # fmt: skip


def names_for(mpi, other, folder):
    kinds = {"openmpi": "Open MPI", "mpich": "MPICH"}
    return {
        "python": str(mpi.python), "bin": str(mpi.python.parent), "mpirun": str(mpi.mpirun), "mpi": kinds[mpi.name],
        "other": str(other.python), "other_bin": str(other.python.parent), "other_mpi": kinds[other.name],
        "folder": str(folder), "env": "/usr/bin/env",
    }  # fmt: skip


def lay_out(folder: Path, names: dict[str, str]) -> None:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("{other}", names["other"]))
        if name in PROGRAMS:
            path.chmod(0o755)


def run(command: list[str], environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user's shell would; past its limit the test fails."""
    return subprocess.run(
        command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT
    )


def left_over(mark: str) -> list[str]:
    """Return the processes that have `mark` in their environment; a moment is given to those that are ending.

    Two looks in a row have to find none: one that is just replacing its program has no environment (15 % of looks
    right after a start).
    """
    end, found = time.monotonic() + 5, marked(mark)
    while time.monotonic() < end:
        before = found
        time.sleep(0.02)
        found = marked(mark)
        if not before and not found:
            break
    return found


def marked(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # those that end meanwhile, and those of others
            if mark.encode() in (process / "environ").read_bytes():
                found.append(f"{process.name} {(process / 'cmdline').read_bytes()!r}")
    return found


def environment(names: dict[str, str], way: dict[str, str], mark: str) -> dict[str, str]:
    foreign = ("OMPI_", "PMI", "PRTE_", "SLURM_", "HYDRA_", "MPI4PY_", "HVDLITE_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    more = {name: value.format(**names) for name, value in way.items()}
    path = ":".join(filter(None, [more.pop("PATH", ""), "/usr/bin:/bin"]))
    return {**environ, **ROOT, **more, "PATH": path, "WRONG_WAY": mark}


def test_a_process_that_stays_would_be_found():
    mark = uuid.uuid4().hex
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "WRONG_WAY": mark}, start_new_session=True)
    try:
        while not Path(f"/proc/{child.pid}/environ").read_bytes():
            time.sleep(0.01)
        assert [line.split()[0] for line in marked(mark)] == [str(child.pid)]
    finally:
        child.kill()
        child.wait()
    assert left_over(mark) == []


@pytest.mark.parametrize(
    ("way", "flavour"), [pytest.param(way, mpi, id=f"{way.name}, {mpi}") for way in WAYS for mpi in way.mpis]
)
def test_a_wrong_way_ends_with_cause_and_remedy_and_leaves_no_process(way, flavour, openmpi, mpich, tmp_path):
    mpi, other = (openmpi, mpich) if flavour == "openmpi" else (mpich, openmpi)
    names, mark = names_for(mpi, other, tmp_path), uuid.uuid4().hex
    lay_out(tmp_path, names)
    command = [word.format(**names) for word in (*way.first, *way.args)]
    done = run(command, environment(names, way.environ, mark), tmp_path)
    assert done.returncode != 0 if way.code is None else done.returncode == way.code, done.stdout + done.stderr
    said = " ".join(done.stderr.split())  # launchers break lines
    for words in way.says:
        assert words.format(**names) in said, done.stderr
    assert "rank of" not in done.stdout
    if way.first:
        check_message(done, way.code)
    assert left_over(mark) == []


def check_message(done: subprocess.CompletedProcess[str], code: int | None) -> None:
    """Of hvdrun's: one message, and nothing of mpirun's. What ranks wrote stands before it, with their numbers."""
    lines = done.stderr.splitlines()
    own = [number for number, line in enumerate(lines) if line.startswith("hvdrun: ")]
    assert len(own) == 1, done.stderr
    before, after = lines[: own[0]], lines[own[0] + 1 :]
    if code == REFUSED:
        assert before == [] and done.stdout == ""
        assert all(line.startswith("  ") for line in after), done.stderr
    else:
        assert all(line.startswith("[") for line in before + after), done.stderr


def test_more_ranks_than_cores_are_no_wrong_way_for_hvdrun(openmpi, mpich, tmp_path):
    ranks = (os.cpu_count() or 1) + 1
    if ranks > 9:
        ranks = 9  # enough to see that no number is refused, and as many as a large machine need not start
    for mpi in (openmpi, mpich):
        mark = uuid.uuid4().hex
        names = names_for(mpi, openmpi, tmp_path)
        command = [str(mpi.python), "-m", "hvdlite.launch", "-np", str(ranks), "--no-label", "echo", "ran"]
        done = run(command, environment(names, {}, mark), tmp_path)
        assert (done.returncode, done.stdout) == (0, "ran\n" * ranks), done.stderr
        assert left_over(mark) == []


@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_root_needs_no_permission_from_hvdrun_and_is_told_once(flavour, openmpi, mpich, tmp_path):
    mpi, mark = openmpi if flavour == "openmpi" else mpich, uuid.uuid4().hex
    environ = without_permission(environment(names_for(mpi, openmpi, tmp_path), {}, mark))
    done = run([str(mpi.python), "-m", "hvdlite.launch", "-np", "1", "echo", "ran"], environ, tmp_path)
    told = "running as root; setting OMPI_ALLOW_RUN_AS_ROOT" in done.stderr
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert told == (flavour == "openmpi" and os.geteuid() == 0)
    assert len(done.stderr.splitlines()) == told
    assert left_over(mark) == []


def test_root_without_permission_is_refused_by_open_mpis_mpirun(openmpi, tmp_path):
    mark = uuid.uuid4().hex
    environ = without_permission(environment(names_for(openmpi, openmpi, tmp_path), {}, mark))
    done = run([str(openmpi.mpirun), "-np", "1", "echo", "ran"], environ, tmp_path)
    if os.geteuid() == 0:  # the remedy of docs/launching.md is these two variables
        assert done.returncode != 0 and done.stdout == ""
        assert "attempt to run as root" in done.stderr and "--allow-run-as-root" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert left_over(mark) == []


def without_permission(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in ROOT}
