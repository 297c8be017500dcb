"""Variables that make an MPI start quickly and run well here, and those that tell that it cannot start here at all.

No MPI in this file, and nothing is set by it.

The caller puts them into the environment before MPI starts; what the user has set stays.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping

# Device files of networks for which Open MPI's OFI and UCX components are the right way.
_FABRICS = ("/sys/class/infiniband/*", "/dev/infiniband/*", "/dev/cxi*", "/dev/hfi1*", "/sys/class/cxi/*")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def mpi_environment(
    environ: Mapping[str, str], fabric: bool | None = None, n_cores: int | None = None
) -> dict[str, str]:
    """Return the variables to add to `environ` before MPI starts. Those that it has already are left out.

    Args:
        fabric: there is a fast network; by default, look for its devices.
        n_cores: how many cores this process may use; by default, ask the system.
    """
    wanted = {"OMPI_MCA_osc": "^ucx"}  # it complains at every shared window, and we use none
    if not (_has_fabric() if fabric is None else fabric):
        wanted["OMPI_MCA_btl"] = "^ofi,uct"  # looking for fabrics takes 1.1 s of Open MPI's start
    if tolerates_losses(environ):
        wanted["OMPI_MCA_coll"] = "^han"  # between hosts its sums were wrong after a loss, without an error
        wanted["OMPI_MCA_mpi_preconnect_mpi"] = "1"  # else ranks of several hosts may wait for ever inside PMIx
    n_local = local_size(environ)
    if n_local is not None and n_local > (len(os.sched_getaffinity(0)) if n_cores is None else n_cores):
        # Ranks that outnumber the cores must let others run while they wait. One that is bound to a
        # single core of many is counted here too: yielding costs little when nobody else wants the core.
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def tolerates_losses(environ: Mapping[str, str]) -> bool:
    """Return whether MPI goes on when ranks are lost: Open MPI under `mpirun --with-ft ulfm`."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "") in ("1", "true")


def local_size(environ: Mapping[str, str]) -> int | None:
    """Return how many ranks the launcher says it started on this host, or None if it says nothing."""
    for name in _LOCAL_SIZES:
        text = environ.get(name, "")
        if text.isdigit():
            return int(text)
    return None


def library_of(module: str | None) -> str:
    """Return whose MPI mpi4py loads, by the file of its module: wheels have one for each. "" if that is not known."""
    name = os.path.basename(module or "")
    return next(
        (of for part, of in (("openmpi", "Open MPI"), ("mpich", "MPICH")) if name.startswith(f"MPI.{part}.")), ""
    )


def misfit(environ: Mapping[str, str], library: str) -> str | None:
    """Return whose launcher started this process, if it started several and `library` cannot find the others by it.

    None also where that is not certain: an Open MPI may know Slurm's PMI-2, an MPICH PMIx, and within a rank
    another launcher may have started this process.
    """
    by_open_mpi = "OMPI_COMM_WORLD_RANK" in environ
    by_hydra = "PMI_RANK" in environ and "PMI_FD" in environ and "SLURM_PROCID" not in environ
    if by_open_mpi and library == "MPICH" and "PMI_RANK" not in environ:
        return "Open MPI" if environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1" else None
    if by_hydra and library == "Open MPI" and not by_open_mpi and "PMIX_RANK" not in environ:
        return "MPICH" if environ.get("PMI_SIZE", "1") != "1" else None
    return None


def _has_fabric() -> bool:
    return any(glob.glob(pattern) for pattern in _FABRICS)
