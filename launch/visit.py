"""Asks all hosts of a job at once whether they can be reached and have what it needs. What to ask: launch/reach.py."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from . import process, reach
from .flavours import HYDRAS
from .hosts import Faults
from .job import Job
from .starter import Starter

_AT_ONCE = 64
_HERE = "this machine"
_SIOCGIFADDR = 0x8915  # Linux' number for: which address has a network device?


@dataclass(frozen=True)
class Found:
    """What is wrong: why hosts gave no answer, by host, and other faults in words."""

    silent: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[str] = ()


def check_hosts(job: Job, starter: Starter, environ: Mapping[str, str], seconds: int | None = None) -> None:
    """Raise Faults unless all hosts answer, and are like this one. Arguments as of `look_at_hosts`."""
    found = look_at_hosts(job, starter, environ, seconds)
    if faults := [*grouped(found.silent), *found.faults]:
        raise Faults(faults)


def grouped(silent: Mapping[str, str]) -> list[str]:
    """Return why hosts are silent, one text per reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in silent.items():
        by_reason.setdefault(why, []).append(name)
    return reach.grouped(by_reason)


def look_at_hosts(
    job: Job,
    starter: Starter,
    environ: Mapping[str, str],
    seconds: int | None = None,
    over: Callable[[], bool] = lambda: False,
) -> Found:
    """Ask all hosts, and return what is wrong with them. Nobody is asked if ssh is not the way there.

    Args:
        environ: what the launcher gets.
        seconds: how long ssh may take to connect; None: as long as is usual.
        over: asked every tenth of a second whether to give up.
    """
    others = [host.name for host in job.places if not process.is_this_machine(host.name)]
    shell = reach.remote_shell(job, starter.flavour, environ)
    if not others or shell is None:
        return Found()
    directory, limit = process.absolute("."), (seconds or reach.WAIT) + reach.WAIT
    ask = partial(reach.question, job, starter.program, directory, environ)

    def visit(name: str) -> process.Outcome:
        argv = ["sh"] if name == _HERE else [*shell, name, "sh"]
        return process.probe(argv, environ, limit, ask(targets.get(name, [])), over)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        addresses = dict(zip(others, threads.map(_address, others), strict=True))
        targets = {} if reach.ports_are_chosen(job, environ) else _targets(job, starter, others, addresses)
        outcomes = dict(zip([_HERE, *others], threads.map(visit, [_HERE, *others]), strict=True))
    answers = {name: answer for name, outcome in outcomes.items() if (answer := reach.read(outcome.out))}
    silent = {
        name: reach.no_answer(name, addresses[name], outcome.code, outcome.err, shell, limit)
        for name, outcome in outcomes.items()
        if name not in answers and name != _HERE
    }
    faults: list[str] = []
    if here := answers.get(_HERE):
        there = {name: answer for name, answer in answers.items() if name != _HERE}
        faults += reach.faults(job, starter.flavour, here, there, directory, starter.program)
    if not silent:  # else what could not be reached is known
        names = {address: name for name, address in addresses.items()}
        faults += reach.shut(answers, {**names, **dict.fromkeys(_own(addresses), process.host_name())})
    return Found(silent, faults)


def _targets(job: Job, starter: Starter, others: Sequence[str], addresses: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what each host is to connect to: this machine, as the launcher's daemons will, and its neighbours.

    Where devices are named, names may lead to another network than MPI will use: then only this machine's addresses.
    """
    if job.interfaces:
        own = [address for name in job.interfaces if (address := _address_of_device(name))]
        return dict.fromkeys(others, own)
    known = [name for name in others if addresses[name]]
    targets = {_HERE: [addresses[name] for name in reach.neighbours([_HERE, *known], 0)]}
    for place, name in enumerate(known):
        back = process.host_name() if starter.flavour in HYDRAS else _own_address(addresses[name])
        targets[name] = [back, *(addresses[other] for other in reach.neighbours(known, place))]
    return targets


def _own(addresses: Mapping[str, str]) -> set[str]:
    return {_own_address(address) for address in addresses.values() if address}


def _address(name: str) -> str:
    """Return the address that a name leads to, or "" if nobody knows it."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _own_address(address: str) -> str:
    """Return the address of this machine on the way to another. Nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((address, 9))
        except OSError:
            return ""
        return str(way.getsockname()[0])


def _address_of_device(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
        return socket.inet_ntoa(found[20:24])
