"""Asks what is installed: libraries, MPI, programs. What may hang or crash runs in a process with a time limit.

`look()` gathers, and decides nothing: launch/findings.py says what the answers mean.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hvdlite._version import __version__
from hvdlite.errors import LaunchError

from . import machine, mpirun, process

LIMIT = 60.0  # seconds for one library; an import from a cold network file system takes many
_SHM = "/dev/shm"

# Each prints one line of JSON. Their own processes: MPI can be started, and can fail, only once in a process.
_MPI4PY = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
words = open("/proc/self/maps").read().split()
print(json.dumps({"version": mpi4py.__version__, "library": MPI.Get_library_version().strip("\\0 \\n"),
                  "files": sorted({word for word in words if "/libmpi" in word})}))
"""
_TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda or "",
                  "devices": torch.cuda.device_count(),
                  "nccl": bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())}))
"""
_ANY = "import json, {0}; print(json.dumps({{'version': {0}.__version__}}))"
LIBRARIES = {
    "mpi4py": _MPI4PY,
    "torch": _TORCH,
    "tensorflow": _ANY.format("tensorflow"),
    "keras": _ANY.format("keras"),
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found, in plain values that JSON can hold.

    Attributes:
        adapters: frameworks that this version of hvdlite serves.
        libraries: of each in LIBRARIES what its probe printed, or `error`, "" if it is not installed.
        mpirun: the program that hvdrun takes, "" if there is none.
        mpirun_says: to --version; empty where it cannot be run.
        mpirun_flavour: value of a Flavour, "" if it is of none.
        on_path: the mpiruns of the shell's PATH, in order.
        mpi_build: what `ompi_info` or `mpichversion` next to mpirun says.
        programs: paths of programs on PATH, "" if not there.
        slurm: what sinfo --version says.
        allocation: number of the Slurm job that this runs in.
        cores, usable, quota: of the machine; numbers of those allowed; cores' worth of time, or None.
        shm: size of /dev/shm and what is free, bytes; None if it is not there.
        leftovers: segments of killed jobs, with bytes.
        tracing_scope: Yama's setting, "" without Yama.
    """

    version: str = __version__
    host: str = ""
    python: str = ""
    python_version: str = ""
    adapters: tuple[str, ...] = ()
    libraries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mpirun: str = ""
    mpirun_says: str = ""
    mpirun_flavour: str = ""
    on_path: tuple[str, ...] = ()
    mpi_build: str = ""
    programs: Mapping[str, str] = field(default_factory=dict)
    slurm: str = ""
    allocation: str = ""
    cores: int = 1
    usable: tuple[int, ...] = (0,)
    quota: float | None = None
    shm: tuple[int, int] | None = None
    leftovers: tuple[tuple[str, int], ...] = ()
    tracing_scope: str = ""


def look(limit: float = LIMIT) -> Facts:
    """Return what is here. No probe takes longer than `limit` seconds, and they run side by side."""
    environ, bin_dir = process.environment(), process.bin_dir()
    path = environ.get("PATH", "")
    program = _mpirun(bin_dir, path)
    with ThreadPoolExecutor() as pool:
        libraries = {name: pool.submit(_ask_library, name, code, environ, limit) for name, code in LIBRARIES.items()}
        says = pool.submit(_say, [program, "--version"] if program else [], environ, limit)
        build = pool.submit(_build, program, environ, limit)
        programs = {name: process.which(name, path) or "" for name in ("ssh", "srun", "sbatch", "sinfo", "nvidia-smi")}
        slurm = pool.submit(_say, [programs["sinfo"], "--version"] if programs["sinfo"] else [], environ, limit)
        n_cores, usable = machine.cores()
        return Facts(
            host=socket.gethostname(),
            python=sys.executable,
            python_version=".".join(map(str, sys.version_info[:3])),
            adapters=tuple(name for name in LIBRARIES if importlib.util.find_spec(f"hvdlite.{name}")),
            libraries={name: answer.result() for name, answer in libraries.items()},
            mpirun=program,
            mpirun_says=says.result(),
            mpirun_flavour=_flavour(says.result()),
            on_path=tuple(machine.folders_with(("mpirun", "mpiexec"), path)),
            mpi_build=build.result(),
            programs=programs,
            slurm=slurm.result().strip(),
            allocation=environ.get("SLURM_JOB_ID", ""),
            cores=n_cores,
            usable=tuple(usable),
            quota=machine.core_quota(),
            shm=machine.file_system(_SHM),
            leftovers=tuple(machine.leftovers(_SHM)),
            tracing_scope=machine.tracing_scope(),
        )


def self_test(ranks: int, limit: float) -> dict[str, Any]:
    """Return the report of hvdlite.testing.self_test, started as hvdrun starts things, or `error`."""
    with process.scratch_directory() as directory:
        report = f"{directory}/report.json"
        hvdrun = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks)]
        command = [*hvdrun, sys.executable, "-m", "hvdlite.testing.self_test", report]
        outcome = process.probe(command, process.environment(), limit)
        if outcome.code == 0:
            try:
                found: dict[str, Any] = json.loads(process.read_file(report))
            except (LaunchError, ValueError) as error:
                return {"error": f"it wrote no report: {error}"}
            return found
    said = [line for line in (outcome.out + outcome.err).splitlines() if line.strip(" -=")]
    ended = "" if outcome.code is None else f"exit code {outcome.code}\n"
    return {"error": ended + "\n".join(said[-12:])}


def _ask_library(name: str, code: str, environ: Mapping[str, str], limit: float) -> dict[str, Any]:
    """Return what `code` prints about a library, or why it does not: `error`, "" if it is not installed."""
    outcome = process.probe([sys.executable, "-c", code], environ, limit)
    last = (outcome.out.strip().splitlines() or [""])[-1]
    if outcome.code == 0 and last.startswith("{"):
        found: dict[str, Any] = json.loads(last)
        return found
    error = (outcome.err.strip().splitlines() or [f"exit code {outcome.code}"])[-1]
    return {"error": "" if error == f"ModuleNotFoundError: No module named {name!r}" else error}


def _mpirun(bin_dir: str, path: str) -> str:
    try:
        return mpirun.find_mpirun(process.which, bin_dir, mpirun.search_path(path, bin_dir))
    except LaunchError:
        return ""


def _flavour(says: str) -> str:
    try:
        return mpirun.flavour_of(says).value
    except LaunchError:
        return ""


def _say(argv: list[str], environ: Mapping[str, str], limit: float) -> str:
    outcome = process.probe(argv, environ, limit) if argv else None
    return outcome.out + outcome.err if outcome and outcome.code == 0 else ""


def _build(program: str, environ: Mapping[str, str], limit: float) -> str:
    """Return what the MPI that `program` belongs to tells of its build."""
    folder = program.rpartition("/")[0]
    for name, arguments in (("ompi_info", ["--parsable", "--all"]), ("mpichversion", [])):
        asked = process.which(name, folder) if folder else None
        if asked:
            return _say([asked, *arguments], environ, limit)
    return ""
