"""What a scheduler has given to this job, from its variables: hosts, and how many ranks each takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from .hosts import Faults, Host, expand, merged, split_list


class Scheduler(Enum):
    SLURM = "Slurm"
    LSF = "LSF"
    PBS = "PBS"
    SGE = "Grid Engine"


# By which variable a job of each is known.
_JOBS = {
    "SLURM_JOB_ID": Scheduler.SLURM, "LSB_JOBID": Scheduler.LSF, "PBS_JOBID": Scheduler.PBS,
    "PE_HOSTFILE": Scheduler.SGE,
}  # fmt: skip


@dataclass(frozen=True)
class Allocation:
    """An allocation. Without hosts: the scheduler's variables do not name them, but its MPI may know."""

    scheduler: Scheduler
    hosts: tuple[Host, ...] = ()
    ranks: int | None = None  # what was asked for; may differ from the sum of the slots
    slots_are_cores: bool = False  # and say nothing of ranks

    @property
    def size(self) -> int | None:
        """How many ranks run when nobody says a number; None if nothing tells."""
        if self.slots_are_cores:
            return None
        return self.ranks or sum(host.slots for host in self.hosts) or None


def scheduler_of(environ: Mapping[str, str]) -> Scheduler | None:
    return next((scheduler for variable, scheduler in _JOBS.items() if variable in environ), None)


def already_one_of(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return how many processes a launcher started of which this is one, and the variable that says so.

    None where this process is alone, as in a batch script or the one shell of `srun --pty`.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        text = environ.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return int(text), name
    return None


def list_file(environ: Mapping[str, str]) -> str | None:
    """Return the path of the file in which this scheduler lists the hosts, if it is one that does."""
    name = {Scheduler.PBS: "PBS_NODEFILE", Scheduler.SGE: "PE_HOSTFILE"}.get(scheduler_of(environ) or Scheduler.SLURM)
    return environ.get(name) if name else None


def allocation_of(environ: Mapping[str, str], listed: str = "") -> Allocation | None:
    """Return the allocation that `environ` describes, or None outside of one.

    Args:
        listed: the text of `list_file(environ)`.
    """
    scheduler = scheduler_of(environ)
    if scheduler is None:
        return None
    if scheduler is Scheduler.SLURM:
        ranks = environ.get("SLURM_NTASKS", "")
        return Allocation(scheduler, _of_slurm(environ), int(ranks) if ranks.isdecimal() else None)
    if scheduler is Scheduler.LSF:
        return Allocation(scheduler, _of_lsf(environ), slots_are_cores="CSM_ALLOCATION_ID" in environ)
    if scheduler is Scheduler.PBS:
        return Allocation(scheduler, merged(Host(name) for name in listed.split()))
    fields = [line.split() for line in listed.splitlines()]  # host, slots, queue, cores
    return Allocation(scheduler, merged(Host(f[0], int(f[1])) for f in fields if len(f) > 1 and f[1].isdecimal()))


def spread(allocation: Allocation, ranks: int) -> Allocation:
    """Return the allocation with room for `ranks`, evenly, where the scheduler said nothing of how many a host takes.

    That is so where slots are cores, and where PBS names each host once (`select=2` without mpiprocs).
    """
    hosts = allocation.hosts
    untold = allocation.scheduler is Scheduler.PBS and all(host.slots == 1 for host in hosts)
    if not hosts or not (allocation.slots_are_cores or (untold and ranks > len(hosts))):
        return allocation
    each, more = divmod(ranks, len(hosts))
    evenly = (Host(host.name, each + (number < more)) for number, host in enumerate(hosts))
    return replace(allocation, hosts=tuple(host for host in evenly if host.slots))


def _of_slurm(environ: Mapping[str, str]) -> tuple[Host, ...]:
    names, counts = environ.get("SLURM_JOB_NODELIST", ""), environ.get("SLURM_TASKS_PER_NODE", "")
    if not names or not counts:  # salloc without a number of tasks, or a step's environment cut down
        return ()
    nodes, slots = nodes_of(names), tasks_per_node(counts)
    if len(nodes) != len(slots):
        raise Faults([f"SLURM_JOB_NODELIST={names!r} are {len(nodes)} nodes, SLURM_TASKS_PER_NODE={counts!r} are "
                      f"{len(slots)}. Say where: -H host:slots,..."])  # fmt: skip
    return tuple(Host(name, number) for name, number in zip(nodes, slots, strict=True) if number)


def nodes_of(text: str) -> list[str]:
    """Read Slurm's list of nodes.

    >>> nodes_of("gpu[01-02,7],login")
    ['gpu01', 'gpu02', 'gpu7', 'login']
    """
    try:
        return [name for part in split_list(text) for name in expand(part)]
    except ValueError:
        raise Faults([f"SLURM_JOB_NODELIST={text!r}: not a list of nodes. Say where: -H host:slots,..."]) from None


def tasks_per_node(text: str) -> list[int]:
    """Read Slurm's numbers of tasks, one per node.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise Faults([f"SLURM_TASKS_PER_NODE={text!r}: expected numbers such as 2(x3),1. Say where: -H host:slots"])
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _of_lsf(environ: Mapping[str, str]) -> tuple[Host, ...]:
    words = environ.get("LSB_MCPU_HOSTS", "").split()  # host slots host slots
    if words:
        pairs = zip(words[::2], words[1::2], strict=False)
        hosts = merged(Host(name, int(slots)) for name, slots in pairs if slots.isdecimal())
    else:
        hosts = merged(Host(name) for name in environ.get("LSB_HOSTS", "").split())
    # Where jobs run through CSM the first host is the one of the batch script, listed with one slot, and takes no rank.
    if environ.get("CSM_ALLOCATION_ID") and len(hosts) > 1 and hosts[0].slots == 1:
        return hosts[1:]
    return hosts
