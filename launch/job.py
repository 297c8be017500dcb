"""What is to be started, as a value: command, ranks, hosts. No file is read here and nothing is started."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .allocation import Allocation
from .hosts import Faults, Host, filled, parse_hostfile, parse_hosts, shown

__all__ = ["Faults", "Host", "Job", "is_python", "parse_hostfile", "parse_hosts"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command that runs once per rank.

    Attributes:
        command: program and arguments.
        ranks: how many processes.
        hosts: where, filled in order; empty: on this machine, or where the scheduler says.
        allocation: what a scheduler gave; counts where `hosts` says nothing.
        exports: variables to hand to the ranks, `NAME` or `NAME=value`.
        bind_to: what each rank is bound to, in mpirun's words.
        binding: arguments that take the place of those that `bind_to` gives.
        mpi_args: arguments for the launcher that hvdrun does not know.
        output: a folder; each rank writes into files of its own there.
        interfaces: network devices to use between hosts; empty: the MPI chooses.
        ssh: options for the ssh that reaches other hosts.
        tcp: Spectrum MPI is to use TCP only.
    """

    command: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    allocation: Allocation | None = None
    exports: tuple[str, ...] = ()
    bind_to: str = "none"
    binding: tuple[str, ...] = ()
    mpi_args: tuple[str, ...] = ()
    output: str = ""
    interfaces: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    tcp: bool = False

    def __post_init__(self) -> None:
        if faults := [*self._faults()]:
            raise Faults(faults)

    @property
    def elsewhere(self) -> bool:
        """Whether ranks may run on other machines than this one."""
        return bool(self.hosts or self.allocation)

    @property
    def places(self) -> list[Host]:
        """How many ranks each host gets, in order; empty if only the launcher knows."""
        hosts = self.hosts or (self.allocation.hosts if self.allocation else ())
        return filled(hosts, self.ranks)

    def _faults(self) -> list[str]:
        faults = []
        if not self.command:
            faults.append("command: no command to run. Example: hvdrun -np 2 python train.py")
        elif self.ranks > 1 and reads_program_from_stdin(self.command):
            faults.append("command: 'python -': mpirun gives the standard input to rank 0 only. "
                          "Put the program in a file.")  # fmt: skip
        if ":" in self.command:
            faults.append("command: ':' as an argument of its own begins another program for every launcher, and "
                          "hvdrun starts the same on all ranks. Put the command into a script.")  # fmt: skip
        if self.ranks < 1:
            faults.append(f"-np: {self.ranks} ranks: at least 1 is needed")
        hosts = self.hosts or (self.allocation.hosts if self.allocation else ())
        slots = sum(host.slots for host in hosts)
        if hosts and self.ranks > slots and not any("oversubscribe" in arg.lower() for arg in self.mpi_args):
            whose = "" if self.hosts or not self.allocation else f" of this {self.allocation.scheduler.value} job"
            faults.append(f"-np: {self.ranks} ranks on {shown(hosts)}{whose}, which take {slots}. "
                          "Ask for fewer, or give hosts more slots.")  # fmt: skip
        faults += [
            f"-x: {export!r} is not NAME or NAME=value"
            for export in self.exports
            if not re.match(r"[A-Za-z_]\w*(=|$)", export)
        ]
        return faults


def is_python(program: str) -> bool:
    return re.match(r"python[\d.]*$", program.rpartition("/")[2]) is not None


def reads_program_from_stdin(command: tuple[str, ...]) -> bool:
    """Return whether it is `python -`, with flags or without."""
    arguments = [argument for argument in command[1:] if not re.fullmatch(r"-[A-Zbdiqsuvx]+", argument)]
    return is_python(command[0]) and arguments[:1] == ["-"]
