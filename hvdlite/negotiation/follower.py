"""One rank's place in a schedule: what it has submitted of it, and what it has run.

`accept` may be called by any thread; everything else belongs to whoever drives.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdlite.messages import Kind, Request, Response, Schedule, number_of
from hvdlite.negotiation.board import Board
from hvdlite.negotiation.cache import ResponseCache
from hvdlite.negotiation.schedule import Numbering

Array = NDArray[Any]


class Enclosing(Protocol):
    """Which batches travel with the ranks' counters, and what this rank puts in."""

    def encloses(self, batch: Sequence[Response]) -> bool:
        """Return whether what the ranks give to `batch` travels with their counters. The same on all ranks."""

    def enclosure(self, name: str) -> bytes:
        """Return what this rank gives to the operation called `name`, which it has submitted. Not empty."""


class NothingEnclosed:
    """`Enclosing` where batches are always run by sending."""

    def encloses(self, batch: Sequence[Response]) -> bool:
        return False

    def enclosure(self, name: str) -> bytes:
        raise AssertionError(f"{name!r} is not enclosed")


class _Slot:
    """One operation of the schedule."""

    __slots__ = ("batch", "count", "fields", "place", "request", "response")

    def __init__(
        self, response: Response, batch: int, request: Request | None, fields: tuple[object, ...], place: int
    ) -> None:
        self.response, self.batch = response, batch
        self.request = request  # of this rank, if the operation has a name
        self.fields, self.place = fields, place  # what this rank's requests must be beyond kind and name, else
        self.count = 0  # submissions since the schedule began


class _Pending(NamedTuple):
    request: Request
    batch: int  # counted from the beginning of the schedule


class Left(NamedTuple):
    """What a rank has submitted and not run: `covered` by its counter, by number of the batch, and the rest."""

    covered: list[_Pending]
    beyond: list[Request]


class Follower:
    """Follows one schedule from its beginning to its end.

    Args:
        enclosing: asked about each batch once, if `board` carries anything.

    Attributes:
        counter: leading batches, counted from the beginning, that this rank has submitted whole. Final once `broken`.
        position: batches that it has run.
        broken: this rank has something that is not in the schedule, or has heard that it ends.
        patience: see `messages.Schedule`.
        most_shown: bytes of values that a rank may show together with its counter; negative for none at all.
        encloses: some of its batches travel with the counters.
    """

    def __init__(
        self, schedule: Schedule, era: int, cache: ResponseCache, rank: int, board: Board, enclosing: Enclosing
    ) -> None:
        self._era, self._board, self._enclosing = era, board, enclosing
        board.begin()
        self.most_shown = board.most_shown
        self.counter = self.position = 0
        self.broken = False
        self.patience = schedule.patience
        self._lock = threading.Lock()
        nameless = [slot.kind for batch in schedule.batches for slot in batch if not isinstance(slot, int)]
        self._numbering = Numbering(nameless, schedule.starts)
        self._by_name: dict[str, _Slot] = {}
        self._by_kind: dict[Kind, list[_Slot]] = {}
        self._batches: list[list[_Slot]] = []
        for number, batch in enumerate(schedule.batches):
            slots = []
            for entry in batch:
                if isinstance(entry, int):
                    slot = _Slot(cache.response(entry), number, cache.request(entry), (), 0)
                    self._by_name[slot.response.name] = slot
                else:
                    siblings = self._by_kind.setdefault(entry.kind, [])
                    slot = _Slot(entry, number, None, expected_fields(entry, rank), len(siblings))
                    siblings.append(slot)
                slots.append(slot)
            self._batches.append(slots)
        self._n = len(self._batches)
        self._is_enclosed = [
            board.carries and enclosing.encloses([slot.response for slot in slots]) for slots in self._batches
        ]
        self.encloses = any(self._is_enclosed)
        # Who shows values for the batch after must know that all ranks have run the one before, see `Board.show`.
        waits = [any(waits_for_all(slot.response) for slot in slots) for slots in self._batches]
        self._may_show = [waits[batch - 1] for batch in range(self._n)]
        self._whole = [0] * self._n  # by batch of the cycle: how often it has been submitted whole
        self._missing = [len(batch) for batch in self._batches]  # and how many it lacks to be so once more
        self._pending: dict[str, _Pending] = {}  # in the order of submission
        self._published = 0

    def accept(self, request: Request) -> bool:
        """Take in a submission, and show the other ranks if a batch has become whole by it.

        False if it does not fit, or the schedule ends: then the negotiator must hear of it, and of all that follow.
        """
        with self._lock:
            if self.broken:
                return False
            slot = self._find(request)
            if slot is None:
                self.broken = True
                return False
            cycle, batch = slot.count, slot.batch
            slot.count = cycle + 1
            self._pending[request.name] = _Pending(request, cycle * self._n + batch)
            if cycle == self._whole[batch]:
                self._missing[batch] -= 1
                if not self._missing[batch] and batch == self.counter % self._n:
                    self._count()
            return True

    def fits(self, request: Request) -> bool:
        """Return whether `accept` would take `request`, unless the schedule is broken off in between."""
        with self._lock:
            return not self.broken and self._find(request) is not None

    def accept_alone(self, request: Request, values: Array | None) -> bool:
        """`accept` a submission that is all of the batch that runs next, where nothing else is pending.

        Then `take_alone`. False, and nothing has changed, if that is not so.

        Args:
            values: of this rank, flat, shown to the others if the cells are surely free: at most `most_shown` bytes.
        """
        with self._lock:
            position = self.position
            cycle, batch = divmod(position, self._n)
            slots = self._batches[batch]
            if self.broken or self._pending or len(slots) != 1 or request != self._request(slots[0], cycle):
                return False
            if values is not None and self._may_show[batch]:
                self._board.show(self._era, position, values)
            slots[0].count = self._whole[batch] = cycle + 1
            self.counter = position + 1  # and no further: nothing else is pending
            self._publish()
            return True

    def take_alone(self, request: Request) -> Response | None:
        """Return the batch of `accept_alone` if every rank has submitted it, after a short spin: it must be run then.

        None if not: it is pending then like any other.
        """
        position = self.position
        if self._board.glimpse(self._era, position):
            self.position = position + 1
            cycle, batch = divmod(position, self._n)
            return self._response(self._batches[batch][0], cycle)
        with self._lock:
            self._pending[request.name] = _Pending(request, position)
        return None

    def shown(self, dtype: np.dtype[Any], n: int) -> list[Array] | None:
        """Return what each rank gives to the batch that was taken last, if all have shown it: `n` elements of `dtype`.

        None, on all ranks alike, if they have not.
        """
        return self._board.shown(self._era, self.position - 1, dtype, n)

    def break_off(self) -> None:
        """Accept nothing more: the counter is final."""
        with self._lock:
            self.broken = True

    def show(self) -> None:
        """Publish what only the thread that drives may publish."""
        counter = self.counter  # other threads may raise it meanwhile
        if counter == self._published:
            return
        enclosed = b""
        if self.encloses:
            # A batch that is enclosed has a message of its own, so that everyone finds it under its number.
            for position in range(self._published, counter):
                if enclosed:
                    self._board.publish(self._era, position, enclosed)
                enclosed = self._enclosure(position)
        self._published = counter
        self._board.publish(self._era, counter, enclosed)

    def _enclosure(self, position: int) -> bytes:
        cycle, batch = divmod(position, self._n)
        if not self._is_enclosed[batch]:
            return b""
        (slot,) = self._batches[batch]
        return self._enclosing.enclosure(self._response(slot, cycle).name)

    def take_enclosed(self) -> dict[int, bytes] | None:
        """Return what the others give to the batch that was taken last, by rank; None if it is not enclosed."""
        position = self.position - 1
        return self._board.take_enclosed(self._era, position) if self._is_enclosed[position % self._n] else None

    def has_all_before(self, end: int) -> bool:
        """Return whether everything enclosed has come for the batches before number `end` that have not been run."""
        return all(
            not self._is_enclosed[position % self._n] or self._board.has_enclosed(self._era, position)
            for position in range(self.position, end)
        )

    @property
    def is_next_whole(self) -> bool:
        """Whether this rank has submitted all of the batch that runs next."""
        return self.counter > self.position

    def take(self, spin: bool) -> list[Response] | None:
        """Return the next batch if every rank has submitted it: it must be run then. None if not."""
        position = self.position
        if position >= self.counter:
            return None
        ready = self._board.glimpse if spin else self._board.reached
        return self.take_anyway() if ready(self._era, position) else None

    def take_anyway(self) -> list[Response]:
        """Return the next batch, of which it is known otherwise that all ranks have submitted it."""
        with self._lock:
            cycle, batch = divmod(self.position, self._n)
            self.position += 1
            responses = [self._response(slot, cycle) for slot in self._batches[batch]]
            for response in responses:
                del self._pending[response.name]
        return responses

    def left(self) -> Left:
        """Return what has been submitted and not run, in the order of submission. Only once `broken`."""
        covered = [pending for pending in self._pending.values() if pending.batch < self.counter]
        return Left(covered, [p.request for p in self._pending.values() if p.batch >= self.counter])

    def beyond(self) -> list[str]:
        """Return the names that wait for the rest of their batch, or of one before it, on this rank."""
        if not self._pending:
            return []
        with self._lock:
            return [name for name, pending in self._pending.items() if pending.batch >= self.counter]

    def _find(self, request: Request) -> _Slot | None:
        slot = self._by_name.get(request.name)
        if slot is not None:
            return slot if slot.request == request else None
        number = number_of(request)
        found = None if number is None else self._numbering.place(request.kind, number)
        if found is None:
            return None
        cycle, place = found
        slot = self._by_kind[request.kind][place]
        return slot if slot.count == cycle and request[2:] == slot.fields else None

    def _count(self) -> None:
        n, whole, missing = self._n, self._whole, self._missing
        while not missing[batch := self.counter % n]:
            self.counter += 1
            whole[batch] += 1
            missing[batch] = sum(slot.count == whole[batch] for slot in self._batches[batch])
        self._publish()

    def _publish(self) -> None:
        if self._board.any_thread:
            self._published = self.counter
            self._board.publish(self._era, self._published)

    def _request(self, slot: _Slot, cycle: int) -> tuple[object, ...]:
        if slot.request is not None:
            return slot.request
        return (slot.response.kind, self._numbering.name(slot.response.kind, slot.place, cycle), *slot.fields)

    def _response(self, slot: _Slot, cycle: int) -> Response:
        if slot.request is not None:
            return slot.response
        kind = slot.response.kind
        return Response(
            kind, self._numbering.name(kind, slot.place, cycle), *slot.response[2:]
        )  # quicker than _replace


def waits_for_all(response: Response) -> bool:
    """Return whether no rank can have run this before every rank has begun to: its result needs something of each."""
    if response.kind is Kind.ALLREDUCE:
        return prod(response.shape) > 0
    return response.kind is Kind.ALLGATHER and min(response.sizes) * prod(response.shape[1:]) > 0


def expected_fields(response: Response, rank: int) -> tuple[object, ...]:
    """Return what set rank `rank` asks for in an operation without a name, beyond its kind and name."""
    shape = response.shape if response.kind is not Kind.ALLGATHER else (response.sizes[rank], *response.shape[1:])
    return Request(
        response.kind, "", response.dtype, shape, response.op, response.root, response.prescale, response.postscale,
        response.splits, response.device, home=response.home,
    )[2:]  # fmt: skip
