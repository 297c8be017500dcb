"""What runs next: decided by one rank of each process set. Pure, no communicator.

Nothing is polled and there are no rounds: ranks announce when they want something,
and a Verdict goes out when something has become ready. A rank that wants nothing
sends nothing. `docs/decisions/0005-asynchronous-coordinator.md` has the reasons.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdlite.messages import JOIN_NAME, Announcement, Kind, Knobs, Refusal, Request, Response, Verdict
from hvdlite.negotiation.checks import check
from hvdlite.negotiation.ledger import Entry, Ledger

# Barriers and joins carry nothing to remember; process-set changes never repeat.
_CACHED = frozenset({Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER})


Answered = tuple[Entry, "int | Response"]


class _Agreed(NamedTuple):
    name: str
    requests: dict[int, Request]


class Coordinator:
    """Hears all ranks of one set and decides.

    Args:
        members: global rank of each set rank.
        capacity: responses remembered by all ranks; 0 remembers none.
        fusion_threshold: bytes, put into every Verdict.
        clock: seconds, from any start.
        on_heard: told which set rank has asked for what.
    """

    def __init__(
        self,
        members: Sequence[int],
        capacity: int,
        fusion_threshold: int,
        clock: Callable[[], float],
        on_heard: Callable[[int, Sequence[Request]], None] = lambda rank, requests: None,
    ) -> None:
        self.members = tuple(members)
        self.ledger = Ledger(len(members))
        self._capacity, self._fusion_threshold, self._clock = capacity, fusion_threshold, clock
        self._on_heard = on_heard
        self._agreed: OrderedDict[int, _Agreed] = OrderedDict()  # least recently used first
        self._id_of: dict[str, int] = {}
        self._next_id = 0
        self._leaving: dict[int, str] = {}
        self._refused: list[Response] = []
        self._knobs: Knobs | None = None

    def hear(self, rank: int, said: Announcement) -> None:
        """Take in what set rank `rank` announced."""
        now = self._clock()
        # An id that was evicted while the announcement was under way is not known here any more;
        # its rank sees the eviction and announces the request in full.
        known = [(self._agreed[i].requests[rank], i) for i in said.ids if i in self._agreed]
        self._on_heard(rank, [*[request for request, _ in known], *said.requests])
        for request, cache_id in known:
            self.ledger.add(rank, request, now, cache_id)
        for request in said.requests:
            self.ledger.add(rank, request, now)

    def retune(self, knobs: Knobs) -> None:
        """Let all ranks run with `knobs` from the next Verdict on. No Verdict is sent for this alone."""
        self._knobs, self._fusion_threshold = knobs, knobs.fusion_threshold

    @property
    def has_news(self) -> bool:
        """Whether `retune` waits for a Verdict to go out: a step that needs none should do without its short cut."""
        return self._knobs is not None

    def leave(self, rank: int, reason: str) -> None:
        """Note that set rank `rank` will take part in nothing more."""
        self._leaving.setdefault(rank, reason)

    def refuse(self, name: str, refusal: Refusal) -> None:
        """Give up on a name that some rank has not submitted. The refusal is for those that have."""
        missing = tuple(self.ledger.missing(name))
        requests = self.ledger.drop(name)
        kind = next(iter(requests.values())).kind
        self._refused.append(Response(kind, name, joined=missing, refusal=refusal))

    def decide(self) -> Verdict | None:
        """Return what has become ready since the last call, or None if nothing has."""
        verdict = Verdict(fusion_threshold=self._fusion_threshold)
        self._refuse_split_groups()
        complete = self.ledger.take_complete()
        answers = self._refuse_whole_groups([(entry, self._answer(entry)) for entry in complete])
        for entry, answer in answers:
            verdict.entries.append(answer)
            self._remember(entry, answer, verdict)
        verdict.entries.extend(self._refused)
        self._refused.clear()
        last = self.ledger.take_joined()
        if last is not None:
            verdict.entries.append(Response(Kind.JOIN, JOIN_NAME, last_joined=last))
        self._shrink(verdict)
        if self._leaving:
            rank, reason = next(iter(self._leaving.items()))
            verdict.shutdown = f"rank {self.members[rank]} {reason}"
        if not (verdict.entries or verdict.evicted or verdict.shutdown):
            return None
        verdict.knobs, self._knobs = self._knobs, None
        return verdict

    def _refuse_split_groups(self) -> None:
        """Where the ranks put different members into a group of one name, its members would wait for ever."""
        for sides in self.ledger.take_split_groups():
            by_value = {f"{group.split('#')[1]} tensors": ranks for group, ranks in sides.items()}
            if len(by_value) < len(sides):  # equally many, but others
                by_value = {f"group {group}": ranks for group, ranks in sides.items()}
            on_ranks = {text: [self.members[rank] for rank in ranks] for text, ranks in by_value.items()}
            for name in self.ledger.names_in_groups(sides):
                self.refuse(name, Refusal("mismatch", name, "group", on_ranks, "Every rank must give the same list."))

    def _answer(self, entry: Entry) -> int | Response:
        joined = [rank for rank in self.ledger.joined if rank not in entry.requests]
        if len(entry.ids) == 1 and not joined:
            (cache_id,) = entry.ids
            if cache_id is not None:
                self._agreed.move_to_end(cache_id)
                return cache_id
        return check(entry.requests, joined, self.members)

    def _refuse_whole_groups(self, answers: list[Answered]) -> list[Answered]:
        """Where one member of a group is refused, refuse the others too: a group runs as one."""
        culprits: dict[str, Refusal] = {}
        for entry, answer in answers:
            if isinstance(answer, Response) and answer.refusal:
                culprits.update({r.group: answer.refusal for r in entry.requests.values() if r.group})
        if not culprits:
            return answers
        answered = {next(iter(entry.requests.values())).name for entry, _ in answers}
        for name in self.ledger.names_in_groups(culprits):  # ranks that disagree on the group left these half done
            if name in answered:  # what is open is the next try of a rank that failed locally
                continue
            group = next(r.group for r in self.ledger.waiting[name].requests.values() if r.group in culprits)
            self.refuse(name, _with_its_group(name, culprits[group]))
        return [(entry, self._also_refused(entry, answer, culprits)) for entry, answer in answers]

    def _also_refused(self, entry: Entry, answer: int | Response, culprits: dict[str, Refusal]) -> int | Response:
        request = next(iter(entry.requests.values()))
        if request.group not in culprits or (isinstance(answer, Response) and answer.refusal):
            return answer
        return Response(request.kind, request.name, refusal=_with_its_group(request.name, culprits[request.group]))

    def _remember(self, entry: Entry, response: int | Response, verdict: Verdict) -> None:
        # What a joined rank took part in cannot be cached: it has no Request to compare the next one with.
        if isinstance(response, int) or response.refusal or response.joined or response.kind not in _CACHED:
            return
        if not self._capacity:
            return
        old = self._id_of.pop(response.name, None)
        if old is not None:
            del self._agreed[old]
        cache_id = self._next_id
        self._next_id += 1
        self._agreed[cache_id] = _Agreed(response.name, entry.requests)
        self._id_of[response.name] = cache_id
        verdict.new_ids[response.name] = cache_id

    def _shrink(self, verdict: Verdict) -> None:
        excess = len(self._agreed) - self._capacity
        if excess <= 0:
            return
        # An id that some rank has announced and that still waits for others must stay known.
        idle = (i for i, agreed in self._agreed.items() if not self.ledger.is_pending(agreed.name))
        for cache_id in list(itertools.islice(idle, excess)):
            del self._id_of[self._agreed.pop(cache_id).name]
            verdict.evicted.append(cache_id)


def _with_its_group(name: str, culprit: Refusal) -> Refusal:
    return Refusal("other", name, f"tensor {name!r} was refused with its group, because: {culprit.exception()}")
