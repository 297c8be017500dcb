"""Which launcher starts the ranks: the decision, over two questions to the machine that the caller passes in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hvdlite.errors import LaunchError

from .allocation import Scheduler
from .flavours import Flavour, flavour_of, pmi_of
from .job import Job
from .mpirun import find_mpirun

LAUNCHERS = ("auto", "mpirun", "srun", "jsrun")
_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


@dataclass(frozen=True)
class Starter:
    """A launcher: whose it is, its path, and for srun the type of process management."""

    flavour: Flavour
    program: str
    pmi: str = ""


@dataclass(frozen=True)
class Machine:
    """What is asked of the machine: `which(name, path)` looks a program up, `ask(argv)` returns what one prints."""

    which: Callable[[str, str], str | None]
    ask: Callable[[list[str]], str]
    bin_dir: str
    path: str


def find_starter(wanted: str, job: Job, machine: Machine) -> Starter:
    """Return the launcher for `job`: the one wanted, or for "auto" the first that is there.

    mpirun comes first also inside of Slurm: Open MPI's and MPICH's use Slurm by themselves, and it is
    certain to fit the MPI that the ranks load, whereas srun with a wrong type lets each rank run alone.
    """
    scheduler = job.allocation.scheduler if job.allocation else None
    if wanted == "auto":
        wanted = _first(scheduler, machine)
    if wanted == "mpirun":
        program = find_mpirun(machine.which, machine.bin_dir, machine.path, job)
        return Starter(flavour_of(machine.ask([program, "--version"])), program)
    found = machine.which(wanted, machine.path)
    if found is None:
        raise LaunchError(f"--launcher {wanted}: there is no {wanted} on PATH")
    if wanted == "jsrun":
        return Starter(Flavour.JSRUN, found)
    return Starter(Flavour.SRUN, found, _pmi(found, machine))


def _first(scheduler: Scheduler | None, machine: Machine) -> str:
    own = any(machine.which(name, machine.bin_dir) for name in ("mpirun", "mpiexec"))
    if scheduler is Scheduler.LSF and not own and machine.which("jsrun", machine.path):
        return "jsrun"
    found = own or any(machine.which(name, machine.path) for name in ("mpirun", "mpiexec"))
    if scheduler is Scheduler.SLURM and not found and machine.which("srun", machine.path):
        return "srun"
    return "mpirun"


def fitting_pmi(machine: Machine) -> str:
    """Return srun's type of process management that fits the MPI of this environment."""
    own = machine.which("mpirun", machine.bin_dir) or machine.which("mpiexec", machine.bin_dir)
    return pmi_of(machine.ask([own, "--version"] if own else [f"{machine.bin_dir}/python", "-c", _LIBRARY]))


def _pmi(srun: str, machine: Machine) -> str:
    """Return the fitting type, if this Slurm has it."""
    pmi = fitting_pmi(machine)
    offered = machine.ask([srun, "--mpi=list"])
    if not re.search(rf"\b{pmi}\b", offered):
        said = " ".join(offered.split())
        raise LaunchError(f"--launcher srun: this MPI needs --mpi={pmi}, which this Slurm does not have. "
                          f"`srun --mpi=list` says {said!r}. Use --launcher mpirun")  # fmt: skip
    return pmi
