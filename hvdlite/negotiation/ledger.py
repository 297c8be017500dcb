"""Who has asked for what: the coordinator's book of one process set. Pure.

A name is complete when every rank has submitted it or has joined. Ranks may
submit in any order. A rank may submit a name again before the others have
submitted it once (after its first try was refused locally); the second waits its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from hvdlite.messages import Kind, Request


@dataclass(slots=True)
class Entry:
    """What is known of one name that not all ranks have submitted yet.

    Attributes:
        requests: by set rank.
        ids: cache ids under which ranks announced it; None for a Request in full.
        since: when the first rank submitted it, in the coordinator's seconds.
    """

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    ids: set[int | None] = field(default_factory=set)


class Ledger:
    """Counts submissions and hands out what is complete, in the order of completion."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: dict[str, Entry] = {}
        self._early: dict[str, deque[tuple[int, Request, int | None]]] = {}
        self._joined: dict[int, None] = {}  # in order of joining
        self._complete: deque[Entry] = deque()
        self._groups: dict[str, dict[str, Entry]] = {}  # complete members, by name, that wait for the others
        self._sides: dict[str, dict[int, str]] = {}  # which group each rank means, by the group's name
        self._suspects: dict[str, None] = {}  # names of groups on which the ranks may differ

    @property
    def joined(self) -> list[int]:
        """Set ranks that have joined, first one first."""
        return list(self._joined)

    @property
    def waiting(self) -> dict[str, Entry]:
        """Names that some rank has not submitted. Not a copy."""
        return self._open

    @property
    def is_quiet(self) -> bool:
        """Whether no name has been submitted twice, and no group is half complete."""
        return not (self._early or self._groups or self._complete)

    def is_pending(self, name: str) -> bool:
        """Return whether `name` waits for ranks, or for other members of its group."""
        return name in self._open or any(name in members for members in self._groups.values())

    def missing(self, name: str) -> list[int]:
        """Return the set ranks that `name` waits for."""
        entry = self._open[name]
        return [r for r in range(self._size) if r not in entry.requests and r not in self._joined]

    def add(self, rank: int, request: Request, now: float, cache_id: int | None = None) -> None:
        """Note that `rank` wants `request`, announced as `cache_id` or in full."""
        if request.kind is Kind.JOIN:
            self._join(rank)
            return
        entry = self._open.get(request.name)
        if entry is None:
            entry = self._open[request.name] = Entry(now)
        elif rank in entry.requests:
            self._early.setdefault(request.name, deque()).append((rank, request, cache_id))
            return
        entry.requests[rank] = request
        entry.ids.add(cache_id)
        if request.group:
            self._note_side(rank, request.group)
        self._settle(request.name, entry)

    def take_complete(self) -> list[Entry]:
        """Return what became complete since the last call. Members of a group come together."""
        done = list(self._complete)
        self._complete.clear()
        return done

    def take_joined(self) -> int | None:
        """If all ranks have joined, forget that they have and return the last one; else None."""
        if len(self._joined) < self._size:
            return None
        last = next(reversed(self._joined))
        self._joined.clear()
        return last

    def drop(self, name: str) -> dict[int, Request]:
        """Forget an incomplete name, and return who had asked for it. A second submission stays."""
        entry = self._open.pop(name)
        self._forget_sides(entry)
        self._admit_early(name, entry.since)
        return entry.requests

    def names_in_groups(self, groups: Container[str]) -> list[str]:
        """Return the incomplete names that some rank submitted as a member of one of `groups`."""
        return [n for n, e in self._open.items() if any(r.group in groups for r in e.requests.values())]

    def take_split_groups(self) -> list[dict[str, list[int]]]:
        """Return, once, each group whose members all ranks have submitted, but not the same: identity -> set ranks."""
        suspects, self._suspects = self._suspects, {}
        found = []
        for base in suspects:
            sides: dict[str, list[int]] = {}
            said = self._sides.get(base, {})
            for rank, group in said.items():
                sides.setdefault(group, []).append(rank)
            if len(said) == self._size and len(sides) > 1:  # else a refusal has settled it meanwhile
                found.append(sides)
        return found

    def _note_side(self, rank: int, group: str) -> None:
        base = group.partition("#")[0]
        sides = self._sides.setdefault(base, {})
        known = sides.get(rank)
        sides[rank] = group
        if known is None and len(sides) == self._size and len(set(sides.values())) > 1:
            self._suspects[base] = None

    def _forget_sides(self, entry: Entry) -> None:
        if not self._sides:
            return
        for rank, request in entry.requests.items():
            base = request.group.partition("#")[0]
            sides = self._sides.get(base, {})
            if sides.get(rank) == request.group:
                del sides[rank]
                if not sides:
                    del self._sides[base]

    def _join(self, rank: int) -> None:
        self._joined[rank] = None
        for name, entry in list(self._open.items()):
            self._settle(name, entry)

    def _settle(self, name: str, entry: Entry) -> None:
        present = len(entry.requests)
        if present < self._size:
            if not self._joined:
                return
            if present + sum(r not in entry.requests for r in self._joined) < self._size:
                return
        del self._open[name]
        self._finish(entry)
        if self._early:
            self._admit_early(name, entry.since)

    def _admit_early(self, name: str, since: float) -> None:
        for rank, request, cache_id in self._early.pop(name, ()):
            self.add(rank, request, since, cache_id)

    def _finish(self, entry: Entry) -> None:
        requests = iter(entry.requests.values())
        request = next(requests)
        if not request.group or any(other.group != request.group for other in requests):
            self._forget_sides(entry)
            self._complete.append(entry)  # a group on which the ranks differ is refused at once
            return
        members = self._groups.setdefault(request.group, {})
        members[request.name] = entry
        if len(members) >= request.group_size:
            self._forget_sides(entry)
            self._complete.extend(self._groups.pop(request.group).values())
