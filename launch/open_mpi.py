"""Arguments for the mpirun of Open MPI 4 and 5, and of Spectrum MPI, which is made from the former.

Open MPI refuses more ranks than cores unless told, and hands to other hosts only what `-x`
names. Version 5 renamed the parameters of its own start (PRRTE): `--prtemca plm_ssh_…`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .allocation import Scheduler
from .flavours import Flavour
from .forwarding import forwarded
from .hosts import shown
from .job import Job


def arguments(job: Job, flavour: Flavour, environ: Mapping[str, str]) -> list[str]:
    args = ["-np", str(job.ranks), *(job.binding or ["--bind-to", job.bind_to])]
    args += _places(job)
    if job.tcp and flavour is Flavour.SPECTRUM:
        args += ["-tcp"]
    five = flavour is Flavour.OPEN_MPI
    if job.ssh:
        args += ["--prtemca", "plm_ssh_args"] if five else ["--mca", "plm_rsh_args"]
        args += [" ".join(job.ssh)]
    args += _interfaces(job, five)
    for name in [*job.exports, *(forwarded(environ, job.exports) if job.elsewhere else [])]:
        args += ["-x", name]
    return args


def _places(job: Job) -> list[str]:
    if job.hosts:
        return ["--host", shown(job.hosts)]
    if job.allocation is None:
        # Its slots are cores, not hardware threads, so that it may refuse what the machine can take.
        # In an allocation the scheduler's number is meant, and more ranks are a mistake.
        return ["--oversubscribe"]
    if job.allocation.scheduler is Scheduler.SLURM or not job.places:
        return []  # every Open MPI knows Slurm
    return ["--host", shown(job.places)]  # those from PyPI and distributions rarely know LSF and PBS


def _interfaces(job: Job, five: bool) -> list[str]:
    if not job.interfaces:
        return []
    names = ",".join(job.interfaces)
    args = ["--mca", "btl_tcp_if_include", names]
    if names != "lo":  # between its daemons Open MPI refuses loopback
        args += ["--prtemca", "prte_if_include", names] if five else ["--mca", "oob_tcp_if_include", names]
    return args
