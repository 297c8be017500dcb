"""Which hosts a job of changing size uses: known, found, set aside. Pure: the time is passed in.

Order is kept: who was there first stays first, and gets the lowest ranks. A host whose rank was lost is set aside, and
used again when the others are not enough: that a process was killed says little of the machine it ran on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..hosts import Host, filled, shown

FOREVER = float("inf")
REMOVED, ADDED = 1, 2  # kinds of a change, as horovodrun has them; 3 is both


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a start run.

    Attributes:
        hosts: how many ranks each gets, in order of the ranks.
        again: those that were set aside, and are needed all the same.
    """

    hosts: tuple[Host, ...]
    again: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    def host_of(self, rank: int) -> str:
        """Return the host of a rank: launchers fill hosts in order."""
        for host in self.hosts:
            if rank < host.slots:
                return host.name
            rank -= host.slots
        return ""


@dataclass
class _Aside:
    count: int = 0
    until: float = 0.0


@dataclass
class Roster:
    """The hosts of a job.

    Args:
        cooldown: shortest and longest time for which a host is set aside, seconds. None: for good.
    """

    cooldown: tuple[float, float] | None = None
    _slots: dict[str, int] = field(default_factory=dict)  # in the order in which hosts were first seen
    _found: set[str] = field(default_factory=set)
    _aside: dict[str, _Aside] = field(default_factory=dict)

    def see(self, hosts: Iterable[Host]) -> None:
        """Take notice of which hosts there are now, with their slots; who is missing may come back to its place."""
        self._found.clear()
        for host in hosts:
            self._slots[host.name] = host.slots
            self._found.add(host.name)

    @property
    def found(self) -> tuple[Host, ...]:
        return tuple(Host(name, slots) for name, slots in self._slots.items() if name in self._found and slots)

    def set_aside(self, name: str, now: float, draw: float) -> float:
        """Set a host aside and return for how long, seconds; each time for longer.

        Args:
            draw: a random number between 0 and 1, so that hosts that failed together do not return together.
        """
        aside = self._aside.setdefault(name, _Aside())
        aside.count += 1
        seconds = FOREVER
        if self.cooldown:
            low, high = self.cooldown
            seconds = min(high, max(low, low * 2.0 ** min(aside.count, 60) + draw * low))
        aside.until = now + seconds
        return seconds

    def place(self, need: int, most: int | None, now: float, absent: Collection[str] = ()) -> Placement | None:
        """Return where `need` to `most` ranks would run now, or None if there is no room for so many.

        Args:
            most: None: as many as there are slots.
            absent: hosts that are not to be used, whatever is known of them.
        """
        there = [host for host in self.found if host.name not in absent]
        aside = [host for host in there if self._until(host.name) > now]
        again: list[Host] = []
        room = sum(host.slots for host in there if host not in aside)
        for host in sorted(aside, key=lambda one: (self._until(one.name), self._aside[one.name].count)):
            if room >= need:
                break
            again.append(host)
            room += host.slots
        if room < need:
            return None
        used = [host for host in there if host not in aside or host in again]
        hosts = filled(used, room if most is None else most)
        names = {host.name for host in hosts}
        return Placement(tuple(hosts), tuple(host.name for host in again if host.name in names))

    def change(self, current: Placement, most: int | None, now: float, absent: Collection[str] = ()) -> int:
        """Return whether what was found is worth a start of another size: 0, or REMOVED and ADDED added up.

        Removed are hosts in use that are gone, or have fewer slots than ranks. Added are slots that would let more
        ranks run, below `most`, or take the place of what is removed.
        """
        gone = self.gone(current)
        kind = REMOVED if gone else 0
        would_be = self.place(1, most, now, absent)
        if would_be is None:
            return kind
        before = {host.name: host.slots for host in current.hosts}
        more = any(host.slots > before.get(host.name, 0) for host in would_be.hosts)
        return kind | (ADDED if more and (gone or would_be.ranks > current.ranks) else 0)

    def gone(self, current: Placement) -> tuple[str, ...]:
        """Return the hosts in use that are gone, or have fewer slots than ranks."""
        slots = {host.name: host.slots for host in self.found}
        return tuple(host.name for host in current.hosts if slots.get(host.name, 0) < host.slots)

    def _until(self, name: str) -> float:
        return self._aside[name].until if name in self._aside else 0.0


def hosts_of(ranks: Iterable[int], placement: Placement, reported: Mapping[int, str]) -> list[str]:
    """Return the hosts of ranks by the names that the roster has for them, in order.

    Args:
        reported: what the host of each rank calls itself. That may be another name, or an address in the roster.
    """
    known = {host.name for host in placement.hosts}
    short = {name.partition(".")[0]: name for name in known}
    found: list[str] = []
    for rank in ranks:
        own = reported.get(rank, "")
        name = own if own in known else short.get(own.partition(".")[0]) or placement.host_of(rank)
        if name and name not in found:
            found.append(name)
    return found


def told(placement: Placement, alone: bool) -> str:
    """Return how many ranks run where, in words. `alone`: only this machine was ever meant."""
    several = "rank" if placement.ranks == 1 else "ranks"
    where = "this machine" if alone else shown(placement.hosts)
    again = "" if alone or not placement.again else f" ({_once_more(placement.again)})"
    return f"{placement.ranks} {several} on {where}{again}"


def _once_more(names: Sequence[str]) -> str:
    return f"{', '.join(names)} in spite of the failure there: the others are not enough"
