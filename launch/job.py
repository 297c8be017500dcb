"""What is to be started, as a value: command, ranks, hosts. No file is read here and nothing is started."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvdlite.errors import LaunchError


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    slots: int = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command that runs once per rank.

    Attributes:
        command: program and arguments.
        ranks: how many processes.
        hosts: where, filled in order; empty: on this machine, or where the scheduler says.
        exports: variables to hand to the ranks, `NAME` or `NAME=value`.
        bind_to: what each rank is bound to, in mpirun's words.
        mpi_args: arguments for mpirun that hvdrun does not know.
    """

    command: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    exports: tuple[str, ...] = ()
    bind_to: str = "none"
    mpi_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.command:
            raise LaunchError("no command to run. Example: hvdrun -np 2 python train.py")
        if self.ranks < 1:
            raise LaunchError(f"{self.ranks} ranks: at least 1 is needed")
        if self.ranks > 1 and _reads_program_from_stdin(self.command):
            raise LaunchError("'python -': mpirun gives the standard input to rank 0 only. Put the program in a file.")
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and self.ranks > slots:
            named = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
            raise LaunchError(
                f"{self.ranks} ranks on {named}, which take {slots}. Ask for fewer, or give hosts more slots."
            )


def _reads_program_from_stdin(command: tuple[str, ...]) -> bool:
    """Return whether it is `python -`, with flags or without."""
    arguments = [argument for argument in command[1:] if not re.fullmatch(r"-[A-Zbdiqsuvx]+", argument)]
    return re.match(r"python[\d.]*$", command[0].rpartition("/")[2]) is not None and arguments[:1] == ["-"]


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `host1:4,host2:4`. A host without a number takes one rank.

    >>> parse_hosts("a:2,b")
    (Host(name='a', slots=2), Host(name='b', slots=1))
    """
    return tuple(_host(part.strip(), f"hosts {text!r}") for part in text.split(","))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Read lines of `host slots=4` or `host:4`; `#` starts a comment. `path` is for messages."""
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.split("#")[0].strip()
        if entry:
            entry = re.sub(r"\s+slots\s*=\s*", ":", entry)
            hosts.append(_host(entry, f"{path}, line {number}: {line!r}"))
    if not hosts:
        raise LaunchError(f"{path}: no host in it. Write one a line: host slots=4")
    return tuple(hosts)


def _host(entry: str, where: str) -> Host:
    name, found, slots = entry.rpartition(":")
    if not found:
        name, slots = entry, "1"
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or not slots.isdecimal() or int(slots) < 1:
        raise LaunchError(f"{where}: expected host:slots, such as node1:4, found {entry!r}")
    return Host(name, int(slots))
