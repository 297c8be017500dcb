"""Arguments for the mpiexec of MPICH and Intel MPI (both are hydra), and for Cray's PALS.

They hand on the whole environment. MPICH takes any number of ranks per host, as `host:n`;
the others know one number for all hosts.
"""

from __future__ import annotations

from .flavours import Flavour
from .hosts import Faults, Host, shown
from .job import Job


def arguments(job: Job, flavour: Flavour) -> list[str]:
    """Return the arguments up to the program; hosts with different numbers are `command`'s business for Intel MPI."""
    if flavour is Flavour.PALS:
        return _pals(job)
    args = [] if _parts(job, flavour) else ["-n", str(job.ranks)]
    if flavour is Flavour.HYDRA:
        args += job.binding or ["-bind-to", job.bind_to]
        if job.hosts:
            args += ["-hosts", shown(job.hosts)]
    else:
        args += job.binding  # `bind_to` is a variable for Intel MPI
        if job.hosts and not _parts(job, flavour):
            args += ["-ppn", str(job.places[0].slots), "-hosts", _names(job.places)]
        if job.ssh:
            args += ["-bootstrap", "ssh", "-bootstrap-exec-args", " ".join(job.ssh)]
    if job.interfaces:
        args += ["-iface", _only_interface(job)]
    for name, value in _given(job):
        args += ["-genv", name, value]
    return args


def command(job: Job, flavour: Flavour, program: list[str]) -> list[str]:
    """Return what stands at the end: the program, or once per host with its number of ranks."""
    parts: list[str] = []
    for host in _parts(job, flavour):
        parts += [*([":"] if parts else []), "-host", host.name, "-n", str(host.slots), *program]
    return parts or program


def _parts(job: Job, flavour: Flavour) -> list[Host]:
    uneven = flavour is Flavour.INTEL and bool(job.hosts) and not one_number(job.places)
    return job.places if uneven else []


def one_number(places: list[Host]) -> bool:
    """Return whether one number of ranks per host says it all: equal, or less only on the last."""
    numbers = [host.slots for host in places]
    return all(number == numbers[0] for number in numbers[:-1]) and numbers[-1] <= numbers[0]


def _pals(job: Job) -> list[str]:
    args = ["-n", str(job.ranks)]
    if job.places:
        if not one_number(job.places):
            raise Faults([f"-H: PALS starts the same number of ranks on each host, here {shown(job.places)}"])
        args += ["--ppn", str(job.places[0].slots)]
    args += job.binding or ["--cpu-bind", job.bind_to]
    if job.hosts:
        args += ["--hosts", _names(job.places)]
    for name, value in _given(job):
        args += ["--env", f"{name}={value}"]
    return args


def _given(job: Job) -> list[tuple[str, str]]:
    """Return the exports with a value: a bare name is handed on with the rest of the environment."""
    pairs = [export.partition("=") for export in job.exports]
    return [(name, value) for name, found, value in pairs if found]


def _names(hosts: list[Host]) -> str:
    return ",".join(host.name for host in hosts)


def _only_interface(job: Job) -> str:
    if len(job.interfaces) > 1:
        raise Faults([f"--network-interfaces: hydra takes one, here {','.join(job.interfaces)}"])
    return job.interfaces[0]
