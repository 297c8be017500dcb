"""Carries announcements to the coordinator and Verdicts back. The only part that talks.

Set rank 0 runs the Coordinator. Steady state: one message up and one down per rank
and batch, of four bytes per tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvdlite.comm.base import Communicator
from hvdlite.messages import (
    Announcement,
    Request,
    Response,
    Tag,
    Verdict,
    decode_announcement,
    decode_json,
    decode_verdict,
    encode_announcement,
    encode_json,
    encode_verdict,
)
from hvdlite.negotiation.cache import ResponseCache
from hvdlite.negotiation.coordinator import Coordinator

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
    """

    def __init__(
        self,
        comm: Communicator,
        coordinator: Coordinator | None,
        on_stall_message: Callable[[int, Tag, Any], None],
        on_answered: Callable[[Sequence[Response]], None] = lambda responses: None,
        say_last: Callable[[], Any] = lambda: None,
    ) -> None:
        self._comm, self.coordinator, self._on_stall_message = comm, coordinator, on_stall_message
        self._on_answered, self._say_last = on_answered, say_last
        self.last_words: dict[int, Any] = {}  # by set rank
        self._cache = ResponseCache()
        self._announced: dict[str, _Said] = {}  # by name: what the next Response of that name answers
        self._later: dict[str, deque[_Said]] = {}  # and what the ones after it do

    @property
    def in_flight(self) -> list[str]:
        """Names that were announced and not answered."""
        return list(self._announced)

    def announce(self, requests: list[Request]) -> None:
        """Tell the coordinator what this rank newly wants."""
        said = Announcement()
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
        while (arrived := self._comm.poll()) is not None:
            self._hear(*arrived, verdicts)
        if self.coordinator is not None:
            decided = self.coordinator.decide()
            if decided is not None:
                message = encode_verdict(decided)
                for rank in range(1, self._comm.size):
                    self._comm.post(rank, message)
                verdicts.append(decided)
        return verdicts

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
                continue
            said = self._answered(response.name)
            if said is None or not said.request.problem:
                responses.append(response)
            new_id = verdict.new_ids.get(response.name)
            if new_id is not None and said is not None:
                cache.insert(new_id, response, said.request)
        lost = []
        for cache_id in verdict.evicted:
            name = cache.evict(cache_id)
            if name is not None and name in self._announced:
                lost += self._withdraw(name, cache_id)
        if lost:
            self.announce(lost)
        return responses

    def close(self) -> None:
        """After the Verdict with `shutdown`: see that every message has been read. Collective.

        A message that is left behind would turn up in whatever MPI makes of the communicator's number next.
        """
        if self.coordinator is None:
            self._comm.post(_COORDINATOR, encode_json(Tag.FAREWELL, self._say_last()))
            return
        self.last_words[_COORDINATOR] = self._say_last()
        while len(self.last_words) < self._comm.size:
            while (arrived := self._comm.poll()) is not None:
                source, message = arrived
                if message[:1] == Tag.FAREWELL:
                    self.last_words[source] = decode_json(message)
            if len(self.last_words) < self._comm.size:
                self._comm.wait(_FAREWELL_WAIT, eager=True)

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
        elif tag is Tag.FAREWELL:
            self.last_words[source] = decode_json(message)
        elif tag is Tag.GOODBYE and self.coordinator is not None:
            self.coordinator.leave(source, decode_json(message))
        else:
            self._on_stall_message(source, tag, decode_json(message))
