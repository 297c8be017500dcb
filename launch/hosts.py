"""Hosts and hostfiles: text to values. All that is wrong in a text is told at once, each with its place."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hvdlite.errors import LaunchError

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?$")  # others make the resolver raise
_MOST_NAMES = 65536  # of one range: a[1-999999999] is a typing mistake, and would fill the memory


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    slots: int = 1


class Faults(LaunchError):
    """What is wrong with the description of a job: one text per fault, each with its field in front."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        several = len(self.faults) > 1
        super().__init__(
            "\n  ".join([f"{len(self.faults)} faults in this job:", *self.faults]) if several else self.faults[0]
        )


def parse_hosts(text: str, field: str = "hosts") -> tuple[Host, ...]:
    """Read `host1:4,host2:4`. A host without a number takes one rank; names may have ranges.

    >>> parse_hosts("a:2,n[08-10]")
    (Host(name='a', slots=2), Host(name='n08', slots=1), Host(name='n09', slots=1), Host(name='n10', slots=1))
    """
    hosts, faults = _read((part.strip(), f"{field} {text!r}") for part in split_list(text))
    if faults:
        raise Faults(faults)
    return merged(hosts)


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Read lines of `host slots=4` or `host:4`; `#` starts a comment. `path` is for messages.

    Open MPI's `max_slots=` is let through: hvdrun never starts more than `slots` anyway.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = re.sub(r"\s+max[_-]slots\s*=\s*\d+", "", line.split("#")[0]).strip()
        if entry:
            entries.append((re.sub(r"\s+slots\s*=\s*", ":", entry), f"{path}, line {number}: {line!r}"))
    hosts, faults = _read(entries)
    if faults:
        raise Faults(faults)
    if not hosts:
        raise Faults([f"{path}: no host in it. Write one a line: host slots=4"])
    return merged(hosts)


def split_list(text: str) -> list[str]:
    """Split at the commas outside of brackets.

    >>> split_list("a[1,3-4]:2,b")
    ['a[1,3-4]:2', 'b']
    """
    return re.split(r",(?![^\[\]]*\])", text)


def expand(name: str) -> list[str]:
    """Return the names that one with ranges stands for. Raises ValueError if it cannot be read.

    >>> expand("n[08-10,1]")
    ['n08', 'n09', 'n10', 'n1']
    """
    before, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, end, after = rest.partition("]")
    if not end:
        raise ValueError
    numbers = [number for part in inside.split(",") for number in _numbers(part)]
    names = [f"{before}{number}{tail}" for number in numbers for tail in expand(after)]
    if len(names) > _MOST_NAMES:
        raise ValueError
    return names


def _numbers(part: str) -> list[str]:
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
    if not found:
        raise ValueError
    first, last = found[1], found[2] or found[1]
    n_names = int(last) - int(first) + 1
    if not 1 <= n_names <= _MOST_NAMES:
        raise ValueError
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Add up the slots of a host that is named repeatedly; it stays where it was named first."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, number) for name, number in slots.items())


def shown(hosts: Iterable[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def filled(hosts: Iterable[Host], ranks: int) -> list[Host]:
    """Return how many ranks each host gets when they are filled in order, without hosts that get none."""
    taken = []
    for host in hosts:
        here = min(host.slots, ranks)
        ranks -= here
        if here:
            taken.append(Host(host.name, here))
    return taken


def _read(entries: Iterable[tuple[str, str]]) -> tuple[list[Host], list[str]]:
    hosts, faults = [], []
    for entry, where in entries:
        try:
            hosts += _hosts(entry)
        except ValueError:
            faults.append(f"{where}: expected host:slots, such as node1:4 or node[01-04]:4, found {entry!r}")
    return hosts, faults


def _hosts(entry: str) -> list[Host]:
    name, found, slots = entry.rpartition(":")
    if not found:
        name, slots = entry, "1"
    names = expand(name)
    if not all(_NAME.match(one) for one in names) or not slots.isdecimal() or int(slots) < 1:
        raise ValueError
    return [Host(one, int(slots)) for one in names]
