"""What runs next: decided by one rank of each process set. Pure, no communicator.

Nothing is polled and there are no rounds: ranks announce when they want something,
and a Verdict goes out when something has become ready. A rank that wants nothing
sends nothing. `docs/decisions/0005-asynchronous-coordinator.md` has the reasons.

Once the ranks repeat themselves, a Verdict begins a schedule, and nothing is announced or decided until some rank
does something else; `negotiation.schedule` says how that is noticed, and `0011-learned-schedule.md` the rest.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from hvdlite.dtypes import SUPPORTED
from hvdlite.messages import (
    JOIN_NAME,
    Announcement,
    Frozen,
    Kind,
    Knobs,
    Refusal,
    Request,
    Response,
    Schedule,
    Verdict,
    number_of,
)
from hvdlite.negotiation.checks import check, wrong_somewhere
from hvdlite.negotiation.ledger import Entry, Ledger
from hvdlite.negotiation.schedule import Learned, Learner, Numbering, Step

# Barriers and joins carry nothing to remember; process-set changes never repeat.
_CACHED = frozenset({Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER})
# Without a name only what the Response says of all that each rank asks; and that is all there is of a barrier.
_NAMELESS = frozenset({Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.REDUCESCATTER, Kind.BARRIER})


Answered = tuple[Entry, "int | Response"]


class _Agreed(NamedTuple):
    name: str
    requests: dict[int, Request]


@dataclass(slots=True)
class _Running:
    """The schedule of this era, and who has said the last word in it.

    Attributes:
        places: of operations without a name among those of their kind, as the Numbering counts; None for the others.
    """

    learned: Learned
    numbering: Numbering
    places: list[list[int | None]]
    frozen: dict[int, Frozen] = field(default_factory=dict)


class Coordinator:
    """Hears all ranks of one set and decides.

    Args:
        members: global rank of each set rank.
        capacity: responses remembered by all ranks; 0 remembers none.
        fusion_threshold: bytes, put into every Verdict.
        clock: seconds, from any start.
        on_heard: told which set rank has asked for what.
        learner: finds what may be run without asking; None: everything is asked for.
    """

    def __init__(
        self,
        members: Sequence[int],
        capacity: int,
        fusion_threshold: int,
        clock: Callable[[], float],
        on_heard: Callable[[int, Sequence[Request]], None] = lambda rank, requests: None,
        learner: Learner | None = None,
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
        self._learner, self._waited = learner, set[str]()  # names that some caller waits for
        self._era = 0
        self._running: _Running | None = None

    def hear(self, rank: int, said: Announcement) -> None:
        """Take in what set rank `rank` announced. Of an era that is over it is ignored: the rank says it again."""
        if said.era != self._era:
            return
        now = self._clock()
        # An id that was evicted while the announcement was under way is not known here any more;
        # its rank sees the eviction and announces the request in full.
        known = [(self._agreed[i].requests[rank], i) for i in said.ids if i in self._agreed]
        self._on_heard(rank, [*[request for request, _ in known], *said.requests])
        for request, cache_id in known:
            self.ledger.add(rank, request, now, cache_id)
        for request in said.requests:
            self.ledger.add(rank, request, now)
        if said.waiting and self._learner is not None and (known or said.requests):
            self._waited.add((said.requests or [request for request, _ in known])[-1].name)

    def hear_frozen(self, rank: int, said: Frozen) -> None:
        """Take in that set rank `rank` has left the schedule, with what it still wants."""
        if said.era == self._era and self._running is not None:
            self._running.frozen.setdefault(rank, said)

    @property
    def breaks(self) -> bool:
        """Whether the schedule ends, so that every rank must say its last word in it."""
        return self._running is not None and (bool(self._running.frozen or self._leaving) or self.has_news)

    def retune(self, knobs: Knobs) -> None:
        """Let all ranks run with `knobs` from the next Verdict on. No Verdict is sent for this alone."""
        self._knobs, self._fusion_threshold = knobs, knobs.fusion_threshold

    @property
    def has_news(self) -> bool:
        """Whether `retune` waits for a Verdict to go out, for which a schedule has to end."""
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
        if self._running is not None:
            if len(self._running.frozen) < len(self.members):
                return None
            self._end_schedule(self._running, verdict)
        self._refuse_split_groups()
        complete = self.ledger.take_complete()
        answers = self._refuse_whole_groups([(entry, self._answer(entry)) for entry in complete])
        for entry, answer in answers:
            verdict.entries.append(answer)
            self._remember(entry, answer, verdict)
        if self._leaving:
            self._refuse_what_is_wrong()
        verdict.entries.extend(self._refused)
        self._refused.clear()
        last = self.ledger.take_joined()
        if last is not None:
            verdict.entries.append(Response(Kind.JOIN, JOIN_NAME, last_joined=last))
        self._shrink(verdict)
        if self._learner is not None and answers:
            self._learn(self._learner, answers, verdict)
        if self._leaving:
            rank, reason = next(iter(self._leaving.items()))
            verdict.shutdown = f"rank {self.members[rank]} {reason}"
        if not (verdict.entries or verdict.evicted or verdict.shutdown or verdict.era):
            return None
        verdict.knobs, self._knobs = self._knobs, None
        return verdict

    def _learn(self, learner: Learner, answers: list[Answered], verdict: Verdict) -> None:
        """Begin a schedule after `verdict` if the ranks have repeated themselves."""
        now = self._clock()
        for entry, answer in answers:
            step = self._step(entry, answer, verdict)
            name = next(iter(entry.requests.values())).name
            waited = name in self._waited
            self._waited.discard(name)
            if step is None:
                learner.disturb(now)
            else:
                learner.note(step, waited, now)
        learned = learner.learned(now)
        if learned is not None and self._may_begin(learned):
            self._begin_schedule(learned, verdict)

    def _step(self, entry: Entry, answer: int | Response, verdict: Verdict) -> Step | None:
        """Return what completed as part of a step, or None if it can be part of none."""
        request = entry.requests.get(0)
        if request is None or (isinstance(answer, Response) and (answer.refusal or answer.joined)):
            return None
        number = number_of(request)
        if number is None:
            slot = answer if isinstance(answer, int) else verdict.new_ids.get(answer.name)
            if slot is None:
                return None
            return Step(slot, request.kind, _nbytes(request), request.group, entry.requests)
        if isinstance(answer, int) or request.kind not in _NAMELESS:
            return None
        if any(other.home != answer.home for other in entry.requests.values()):  # the Response does not say all
            return None
        return Step(answer._replace(name=""), request.kind, _nbytes(request), "", entry.requests, number)

    def _may_begin(self, learned: Learned) -> bool:
        """Whether nothing is under way that a schedule would only be left for again."""
        if self._leaving or self.ledger.joined or not self.ledger.is_quiet:
            return False
        steps = [step for batch in learned.batches for step in batch]
        slots = {step.slot for step in steps}
        kinds = {step.kind for step in steps if step.number >= 0}
        if any(isinstance(slot, int) and slot not in self._agreed for slot in slots):
            return False
        for entry in self.ledger.waiting.values():
            request = next(iter(entry.requests.values()))
            if self._id_of.get(request.name) not in slots and (number_of(request) is None or request.kind not in kinds):
                return False
        return True

    def _begin_schedule(self, learned: Learned, verdict: Verdict) -> None:
        steps = [step for batch in learned.batches for step in batch]
        last = {step.kind: step.number for step in steps if step.number >= 0}
        starts = {kind.value: number + 1 for kind, number in last.items()}
        numbering = Numbering([step.kind for step in steps if step.number >= 0], starts)
        seen = dict.fromkeys(last, -1)
        places: list[list[int | None]] = []
        for batch in learned.batches:
            places.append([])
            for step in batch:
                if step.number >= 0:
                    seen[step.kind] += 1
                places[-1].append(seen[step.kind] if step.number >= 0 else None)
        self._era += 1
        self._running = _Running(learned, numbering, places)
        self._waited.clear()
        self.ledger = Ledger(len(self.members))  # whoever has asked for something asks for it again
        verdict.era = self._era
        verdict.schedule = Schedule(
            [[step.slot for step in batch] for batch in learned.batches], starts, learned.patience
        )

    def _end_schedule(self, running: _Running, verdict: Verdict) -> None:
        """Note where the schedule has ended, and who wants what from there on.

        A batch has been run, or can be, if and only if every rank has submitted it whole.
        """
        now, frozen, batches = self._clock(), running.frozen, running.learned.batches
        verdict.end = min(said.counter for said in frozen.values())
        self._era += 1
        verdict.era = self._era
        self._running = None
        for rank, said in sorted(frozen.items()):
            since = now - said.waited
            again: list[tuple[Request, int | None]] = []
            for number in range(verdict.end, said.counter):
                cycle, batch = divmod(number, len(batches))
                for step, place in zip(batches[batch], running.places[batch], strict=True):
                    if isinstance(step.slot, int):
                        again.append((self._agreed[step.slot].requests[rank], step.slot))
                    else:
                        assert place is not None
                        name = running.numbering.name(step.kind, place, cycle)
                        again.append((step.requests[rank]._replace(name=name), None))
            again += [(self._agreed[i].requests[rank], i) for i in said.ids]
            again += [(request, None) for request in said.requests]
            self._on_heard(rank, [request for request, _ in again])
            for request, cache_id in again:
                self.ledger.add(rank, request, since, cache_id)
        assert self._learner is not None
        awaited = next((said.awaited for said in frozen.values() if said.awaited), "")
        key = self._key_of(awaited, running) if awaited else None
        self._learner.ended(running.learned, verdict.end // len(batches), key, now, blameless=self.has_news)

    def _key_of(self, name: str, running: _Running) -> Hashable:
        """Return the learner's key of the operation called `name`, or None if it is not of the schedule."""
        cache_id = self._id_of.get(name)
        keys = iter(running.learned.keys)
        for batch, places in zip(running.learned.batches, running.places, strict=True):
            for step, place in zip(batch, places, strict=True):
                key = next(keys)
                if step.slot == cache_id:
                    return key
                if place is not None and (number := number_of(Request(step.kind, name))) is not None:
                    found = running.numbering.place(step.kind, number)
                    if found is not None and found[1] == place:
                        return key
        return None

    def _refuse_split_groups(self) -> None:
        """Where the ranks put different members into a group of one name, its members would wait for ever."""
        for sides in self.ledger.take_split_groups():
            by_value = {f"{group.split('#')[1]} tensors": ranks for group, ranks in sides.items()}
            if len(by_value) < len(sides):  # equally many, but others
                by_value = {f"group {group}": ranks for group, ranks in sides.items()}
            on_ranks = {text: [self.members[rank] for rank in ranks] for text, ranks in by_value.items()}
            for name in self.ledger.names_in_groups(sides):
                self.refuse(name, Refusal("mismatch", name, "group", on_ranks, "Every rank must give the same list."))

    def _refuse_what_is_wrong(self) -> None:
        """Before the set stops: whoever comes to such a name later is to hear why, not only that a rank has left."""
        for name, entry in list(self.ledger.waiting.items()):
            refusal = wrong_somewhere(entry.requests, self.members)
            if refusal is not None:
                self.refuse(name, refusal)

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
        if not self._capacity or number_of(response) is not None:  # a number never comes again
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


def _nbytes(request: Request) -> int:
    return prod(request.shape) * SUPPORTED[request.dtype].itemsize if request.dtype else 0


def _with_its_group(name: str, culprit: Refusal) -> Refusal:
    return Refusal("other", name, f"tensor {name!r} was refused with its group, because: {culprit.exception()}")
