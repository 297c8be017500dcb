"""Carries announcements to the coordinator and Verdicts back. The only part that talks.

Set rank 0 runs the Coordinator. Repeated tensors cost one message up and one down per rank
and batch, of four bytes per tensor. Once they are a schedule there are no messages: a `Follower` counts what this
rank submits, a `Board` shows it to the others, and `take` returns what is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hvdlite.comm.base import Communicator
from hvdlite.messages import (
    Announcement,
    Frozen,
    Refusal,
    Request,
    Response,
    Schedule,
    Tag,
    Verdict,
    decode_announcement,
    decode_counter,
    decode_frozen,
    decode_json,
    decode_verdict,
    encode_announcement,
    encode_frozen,
    encode_json,
    encode_verdict,
)
from hvdlite.negotiation.board import Board, MessageBoard
from hvdlite.negotiation.cache import ResponseCache
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.follower import Enclosing, Follower, NothingEnclosed

_COORDINATOR = 0
_FAREWELL_WAIT = 0.25  # seconds; a message ends it


class _Said(NamedTuple):
    """What this rank has announced, and the id under which it did; None if in full."""

    request: Request
    cache_id: int | None


class Negotiator:
    """One rank's end of the protocol of one process set. Used by the engine thread only.

    Args:
        coordinator: on set rank 0, else None.
        on_stall_message: called with (source rank, tag, value) for what the stall watch exchanges.
        on_answered: told all Responses of a Verdict, before any of them runs.
        say_last: what the coordinator's rank is to know of this one at the end, to be written as JSON.
        board: of the set; None for one that sends messages.
        enclosing: which batches travel with the ranks' counters, and what this rank gives to them.

    Attributes:
        follower: of the schedule that runs, or None while everything is asked for.
        enclosed: what the other ranks give to the batch that `take` or `finish` returned last, by set rank; None
            if that has to be sent.
        late_refusals: by name, what other ranks had found wrong, but this one had not asked for when the set stopped.
        news: the last `advance` heard how far other ranks have come: there may be something to `take`.
    """

    def __init__(
        self,
        comm: Communicator,
        coordinator: Coordinator | None,
        on_stall_message: Callable[[int, Tag, Any], None],
        on_answered: Callable[[Sequence[Response]], None] = lambda responses: None,
        say_last: Callable[[], Any] = lambda: None,
        board: Board | None = None,
        enclosing: Enclosing | None = None,
    ) -> None:
        self._comm, self.coordinator, self._on_stall_message = comm, coordinator, on_stall_message
        self._on_answered, self._say_last = on_answered, say_last
        self.last_words: dict[int, Any] = {}  # by set rank
        self.late_refusals: dict[str, Refusal] = {}
        self._cache = ResponseCache()
        self._announced: dict[str, _Said] = {}  # by name: what the next Response of that name answers
        self._later: dict[str, deque[_Said]] = {}  # and what the ones after it do
        self._board = MessageBoard(comm) if board is None else board
        self._enclosing: Enclosing = NothingEnclosed() if enclosing is None else enclosing
        self.follower: Follower | None = None
        self.enclosed: dict[int, bytes] | None = None
        self._ended: list[Verdict] = []  # the last one ends the schedule, but something enclosed is under way
        self._set_aside: deque[tuple[int, bytes]] = deque()  # messages that came after it
        self._era = 0
        self.news = False
        self._ending = 0  # set rank 0: the last era that all have been told to end
        self._is_frozen = False  # this rank has said its last word in the schedule
        self._held: list[Request] = []  # submitted since then

    @property
    def in_flight(self) -> list[str]:
        """Names that were announced and not answered."""
        return list(self._announced)

    def announce(self, requests: list[Request], waiting: bool = False) -> None:
        """Tell the coordinator what this rank newly wants: while a schedule runs, what does not fit it.

        Args:
            waiting: the caller waits for these before it submits more.
        """
        if self.follower is not None:
            self.follower.break_off()
            self._held += requests
            return
        said = Announcement(era=self._era, waiting=waiting)
        for request in requests:
            # After another of the same name only in full: ids of a message are heard before its requests.
            cache_id = None if request.name in self._announced else self._cache.lookup(request)
            if cache_id is None:
                said.requests.append(request)
            else:
                said.ids.append(cache_id)
            self._expect(_Said(request, cache_id))
        self._tell(said)

    def leave(self, reason: str) -> None:
        """Say that this rank takes part in nothing more; a Verdict with `shutdown` will follow."""
        if self.coordinator is not None:
            self.coordinator.leave(_COORDINATOR, reason)
        else:
            self._comm.post(_COORDINATOR, encode_json(Tag.GOODBYE, reason))

    def advance(self) -> list[Verdict]:
        """Read what has arrived, and return the Verdicts that it led to, in order. Does not wait."""
        verdicts: list[Verdict] = []
        self.news = False
        if self._ended:
            return self._when_complete(self._ended)
        while (arrived := self._next_message()) is not None:
            self._hear(*arrived, verdicts)
            if verdicts and verdicts[-1].era:
                return self._when_complete(verdicts)  # what comes after it belongs to another era
        if self.coordinator is not None:
            if self.coordinator.breaks and self._ending != self._era:
                self._ending = self._era
                self.freeze()
                for rank in range(1, self._comm.size):
                    self._comm.post(rank, encode_json(Tag.FREEZE, self._era))
            decided = self.coordinator.decide()
            if decided is not None:
                message = encode_verdict(decided)
                for rank in range(1, self._comm.size):
                    self._comm.post(rank, message)
                verdicts.append(decided)
                return self._when_complete(verdicts)
        return verdicts

    def _next_message(self) -> tuple[int, bytes] | None:
        return self._set_aside.popleft() if self._set_aside else self._comm.poll()

    def _when_complete(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Return `verdicts` if all is here that the batches need which the last one still lets run.

        What was enclosed for them has been sent before the Verdict was made, but by others, and may come later.
        """
        follower, end = self.follower, verdicts[-1].end
        while end >= 0 and follower is not None and not follower.has_all_before(end):
            arrived = self._comm.poll()
            if arrived is None:
                self._ended = verdicts
                return []
            source, message = arrived
            if message[:1] == Tag.COUNTER:
                self._board.hear(source, *decode_counter(message))
                self.news = True
            else:
                self._set_aside.append(arrived)
        self._ended = []
        return verdicts

    def take(self, spin: bool = False) -> list[Response] | None:
        """Return the batch of the schedule that all ranks run now, or None. It must be run.

        Also by a rank that has said its last word: the others, who may not have heard that yet, are running it.

        Args:
            spin: look for some microseconds if it is only the other ranks that are missing.
        """
        follower = self.follower
        if follower is None:
            return None
        if not self._board.any_thread:
            follower.show()
        batch = follower.take(spin)
        if batch is not None:
            self.enclosed = follower.take_enclosed()
            self._on_answered(batch)
        return batch

    def take_alone(self, follower: Follower, request: Request) -> Response | None:
        """Return the batch of `follower.accept_alone`, if all ranks run it now, or None. It must be run."""
        if not self._board.any_thread:
            follower.show()
        response = follower.take_alone(request)
        if response is not None:
            self._on_answered((response,))
        return response

    def freeze(self, waited: float = 0.0, awaited: str = "") -> None:
        """Leave the schedule: say how far this rank has come, and what else it wants.

        Args:
            waited, awaited: see `Frozen`.
        """
        follower = self.follower
        if follower is None or self._is_frozen:
            return
        follower.break_off()
        if not self._board.any_thread:
            follower.show()  # with what is enclosed, which the others wait for
        self._is_frozen = True
        said = Frozen(self._era, follower.counter, waited=waited, awaited=awaited)
        for request in follower.left().beyond:
            self._write_down(request, said)
        held, self._held = self._held, []
        for request in held:
            self._write_down(request, said)
        if self.coordinator is not None:
            self.coordinator.hear_frozen(_COORDINATOR, said)
        else:
            self._comm.post(_COORDINATOR, encode_frozen(said))

    def finish(self, verdict: Verdict) -> Iterator[list[Response]]:
        """Yield the batches that are still to be run, in this order, of the schedule that `verdict` ends, if it does.

        Afterwards this rank waits for answers to what is left.
        """
        follower = self.follower
        if verdict.end < 0 or follower is None:
            return
        while follower.position < verdict.end:
            batch = follower.take_anyway()
            self.enclosed = follower.take_enclosed()
            self._on_answered(batch)
            yield batch
        self.follower, self._is_frozen, self._era = None, False, verdict.era
        announced, self._announced = self._announced, {}  # the rest, which `freeze` has written down
        later, self._later = self._later, {}
        for pending in follower.left().covered:
            self._expect(_Said(pending.request, self._cache.lookup(pending.request)))
        for said in announced.values():
            self._expect(said)
        for queue in later.values():
            for said in queue:
                self._expect(said)

    def learn(self, verdict: Verdict) -> list[Response]:
        """Return the Responses of `verdict` that concern this rank, in full, and bring the cache to what it says.

        Left out are refusals of requests that were wrong here and have been raised already, and
        refusals that came before this rank has asked.
        """
        cache = self._cache
        responses = []
        everything = [cache.response(e) if isinstance(e, int) else e for e in verdict.entries]
        self._on_answered(everything)
        for response in everything:
            if self._comm.rank in response.joined:  # what this rank has announced under that name is another call
                if response.refusal is None:
                    responses.append(response)
                elif verdict.shutdown and response.refusal.kind == "remote":
                    self.late_refusals[response.name] = response.refusal
                continue
            said = self._answered(response.name)
            if said is None or not said.request.problem:
                responses.append(response)
            new_id = verdict.new_ids.get(response.name)
            if new_id is not None and said is not None:
                cache.insert(new_id, response, said.request)
        self._evict(verdict.evicted)
        if verdict.schedule is not None:
            self._begin(verdict.schedule, verdict.era)
        elif verdict.end >= 0:
            held, self._held = self._held, []
            if held:
                self.announce(held)
        return responses

    def close(self) -> None:
        """After the Verdict with `shutdown`: see that every message has been read, and close the board. Collective.

        A message that is left behind would turn up in whatever MPI makes of the communicator's number next.
        """
        peers = set(self._board.peers)
        self.last_words[self._comm.rank] = mine = self._say_last()
        for rank in peers if self.coordinator is not None else peers | {_COORDINATOR}:
            self._comm.post(rank, encode_json(Tag.FAREWELL, mine))
        expected = peers if self.coordinator is None else set(range(self._comm.size))
        while not expected <= self.last_words.keys():
            while (arrived := self._next_message()) is not None:
                source, message = arrived
                if message[:1] == Tag.FAREWELL:
                    self.last_words[source] = decode_json(message)
            if not expected <= self.last_words.keys():
                self._comm.wait(_FAREWELL_WAIT, eager=True)
        self._board.close()

    def _begin(self, schedule: Schedule, era: int) -> None:
        """Follow `schedule`, and submit to it what has not been answered yet."""
        follower = self.follower = Follower(
            schedule, era, self._cache, self._comm.rank, self._board, self._enclosing
        )  # fmt: skip
        self._era = era
        unanswered = [said.request for said in self._announced.values()]
        unanswered += [said.request for queue in self._later.values() for said in queue]
        self._announced, self._later = {}, {}
        held, self._held = self._held, []
        for request in [*unanswered, *held]:
            if not follower.accept(request):
                self._held.append(request)

    def _write_down(self, request: Request, said: Frozen) -> None:
        cache_id = None if request.name in self._announced else self._cache.lookup(request)
        if cache_id is None:
            said.requests.append(request)
        else:
            said.ids.append(cache_id)
        self._expect(_Said(request, cache_id))

    def _expect(self, said: _Said) -> None:
        name = said.request.name
        if name in self._announced:  # after a request that was wrong here; they are answered in this order
            self._later.setdefault(name, deque()).append(said)
        else:
            self._announced[name] = said

    def _answered(self, name: str) -> _Said | None:
        said = self._announced.pop(name, None)
        if name in self._later:
            self._announced[name] = self._later[name].popleft()
            if not self._later[name]:
                del self._later[name]
        return said

    def _evict(self, cache_ids: Sequence[int]) -> None:
        lost = []
        for cache_id in cache_ids:
            name = self._cache.evict(cache_id)
            if name is not None and name in self._announced:
                lost += self._withdraw(name, cache_id)
        if lost:
            self.announce(lost)

    def _withdraw(self, name: str, cache_id: int) -> list[Request]:
        """Forget what was announced by an id that the coordinator did not know any more, and return it."""
        queue = [self._announced.pop(name), *self._later.pop(name, ())]
        for said in queue:
            if said.cache_id != cache_id:
                self._expect(said)
        return [said.request for said in queue if said.cache_id == cache_id]

    def _tell(self, said: Announcement) -> None:
        if self.coordinator is not None:
            self.coordinator.hear(_COORDINATOR, said)
        else:
            self._comm.post(_COORDINATOR, encode_announcement(said))

    def _hear(self, source: int, message: bytes, verdicts: list[Verdict]) -> None:
        tag = Tag(message[:1])
        if tag is Tag.VERDICT:
            verdicts.append(decode_verdict(message))
        elif tag is Tag.ANNOUNCE and self.coordinator is not None:
            self.coordinator.hear(source, decode_announcement(message))
        elif tag is Tag.COUNTER:
            self._board.hear(source, *decode_counter(message))
            self.news = True
        elif tag is Tag.FREEZE:
            if decode_json(message) == self._era:
                self.freeze()
        elif tag is Tag.FROZEN and self.coordinator is not None:
            self.coordinator.hear_frozen(source, decode_frozen(message))
        elif tag is Tag.FAREWELL:
            self.last_words[source] = decode_json(message)
        elif tag is Tag.GOODBYE and self.coordinator is not None:
            self.coordinator.leave(source, decode_json(message))
        else:
            self._on_stall_message(source, tag, decode_json(message))
