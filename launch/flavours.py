"""Whose launcher it is: that decides how everything on its command line is spelt."""

from __future__ import annotations

import re
from enum import Enum

from hvdlite.errors import LaunchError


class Flavour(Enum):
    """What starts the ranks. The value is its name for people."""

    OPEN_MPI = "Open MPI"  # 5 and later, on PRRTE
    OPEN_MPI_4 = "Open MPI 4"
    SPECTRUM = "IBM Spectrum MPI"
    HYDRA = "MPICH"
    INTEL = "Intel MPI"
    PALS = "PALS"  # of Cray, for its MPICH
    SRUN = "srun"
    JSRUN = "jsrun"


OPEN_MPIS = (Flavour.OPEN_MPI, Flavour.OPEN_MPI_4, Flavour.SPECTRUM)
HYDRAS = (Flavour.HYDRA, Flavour.INTEL)


def flavour_of(version: str) -> Flavour:
    """Return whose mpirun printed `version` (of `mpirun --version`)."""
    if "Spectrum MPI" in version:
        return Flavour.SPECTRUM
    if "Open MPI" in version or "OpenRTE" in version:
        found = re.search(r"\b(\d+)\.\d+", version)
        return Flavour.OPEN_MPI_4 if found and int(found[1]) < 5 else Flavour.OPEN_MPI
    if "Intel(R) MPI" in version:
        return Flavour.INTEL
    if "HYDRA" in version:
        return Flavour.HYDRA
    if re.search(r"\bPALS\b", version, re.I):
        return Flavour.PALS
    first = (version.strip().splitlines() or [""])[0]
    raise LaunchError(f"this mpirun is neither Open MPI's nor MPICH's; `mpirun --version` says {first!r}")


def pmi_of(library: str) -> str:
    """Return the `srun --mpi=` type for an MPI, by its own version text (`MPI.Get_library_version()`) or mpirun's.

    With another type the ranks would not find each other: each would run alone.
    """
    if "CRAY MPICH" in library.upper():
        return "cray_shasta"
    if any(name in library for name in ("Open MPI", "OpenRTE", "Spectrum MPI")):
        return "pmix"
    if any(name in library for name in ("MPICH", "HYDRA", "Intel(R) MPI", "MVAPICH")):
        return "pmi2"
    first = (library.strip().splitlines() or [""])[0]
    raise LaunchError(f"which `srun --mpi=` type fits this MPI is not known; it calls itself {first!r}. Say "
                      "--launcher mpirun, or start with srun itself")  # fmt: skip
