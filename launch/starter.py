"""Which launcher starts the ranks: the decision, over two questions to the machine that the caller passes in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdlite.errors import LaunchError

from .allocation import Scheduler
from .flavours import HYDRAS, OPEN_MPIS, Flavour, flavour_of, pmi_of
from .job import Job, is_python
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


def check_fit(wanted: str, starter: Starter, job: Job, machine: Machine, environ: Mapping[str, str]) -> None:
    """Refuse a Python beside which another family's mpirun lies: it would load that MPI, and each rank run alone.

    Relatives are let through: MPICH's and Intel's start each other's ranks. So is who names an MPI for mpi4py, or
    a launcher: `wanted` is not "auto".
    """
    if wanted != "auto":
        return
    python, chosen = job.command[0], "MPI4PY_LIBMPI"
    found = machine.which(python, machine.path) if is_python(python) else None
    named = {export.partition("=")[0] for export in job.exports}
    if not found or chosen in environ or chosen in named:
        return
    folder = found.rpartition("/")[0]
    other = machine.which("mpirun", folder)
    if other in (None, starter.program):
        return
    flavour = _flavour_or_none(machine.ask([other, "--version"]))
    families = [next((family for family in (OPEN_MPIS, HYDRAS) if one in family), None)
                for one in (starter.flavour, flavour)]  # fmt: skip
    if flavour and None not in families and families[0] != families[1]:
        raise LaunchError(
            f"two MPIs: {starter.program} is {starter.flavour.value}, but {python!r} is {found}, with "
            f"{flavour.value} beside it; each rank would run alone. Start the job with that environment's own hvdrun "
            f"({folder}/python -m hvdlite.launch), or with the Python of this one ({machine.bin_dir}/python). "
            f"If they do fit, say so with --launcher mpirun"
        )


def _flavour_or_none(version: str) -> Flavour | None:
    try:
        return flavour_of(version)
    except LaunchError:
        return None


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
