"""What this rank has submitted and not got back yet. The one place where threads meet."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from hvdlite.buffers import Buffer
from hvdlite.comm.arena import Home
from hvdlite.engine.handle import Handle
from hvdlite.errors import DuplicateNameError
from hvdlite.messages import Kind, Request
from hvdlite.negotiation.follower import Follower

# Returns the flat memory for a result of that shape, and what the caller gets for it.
Allocate = Callable[[tuple[int, ...]], "tuple[NDArray[Any], Any]"]
Site = tuple[str, int]
_INSIDE = ("hvdlite", "torch.", "tensorflow.", "keras.", "contextlib")


@dataclass(slots=True)
class Submission:
    """One Request on its way, with the memory that it is about.

    Attributes:
        source: read by the engine; None where the rank gives nothing.
        target: written by the engine, when its size is known beforehand; may be `source`.
        allocate: makes the target when it is not.
        value: what the handle gets when `target` is filled.
        site: file and line of the caller.
        since: when it was submitted, monotonic seconds.
        home: where `target` lies in a shared buffer.
    """

    request: Request
    handle: Handle
    source: Buffer | None = None
    target: Buffer | None = None
    allocate: Allocate | None = None
    value: Any = None
    site: Site = ("", 0)
    since: float = 0.0
    home: Home | None = None

    @property
    def where(self) -> str:
        """The caller, as `train.py:88`."""
        return f"{self.site[0]}:{self.site[1]}"


class Inbox:
    """Submissions by name: new ones, ones in flight, and ones whose name is still taken.

    Args:
        on_accepted: told which Request has become part of the schedule that runs. Any thread.

    Attributes:
        attention: something was submitted since the last `drain` that needs somebody to drive.
    """

    def __init__(self, on_accepted: Callable[[Request], None] = lambda request: None) -> None:
        self._on_accepted = on_accepted
        self._follower: Follower | None = None
        self.attention = False
        self._lock = threading.Lock()
        self._new: list[Request] = []  # that nobody has been told of, in the order of submission
        self._in_flight: dict[str, Submission] = {}
        self._deferred: dict[str, deque[Submission]] = {}
        self._joining: Submission | None = None  # waits until nothing is deferred
        self._alone: Request | None = None  # in flight without a Submission, see `submit_alone`
        self._closed: Callable[[Request], BaseException] | None = None
        # What was in flight then: its memory, where other ranks may still be at work, lives as long as this.
        self._left_behind: list[Submission] = []

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Take in `submissions`, all or none.

        A name in flight may wait for a second operation only if that is of another kind;
        then the ranks must submit the two in the same order.

        Raises:
            DuplicateNameError: a name is in flight for the same kind of operation.
        """
        site, now = call_site(), time.monotonic()
        with self._lock:
            if self._closed is not None:
                raise self._closed(submissions[0].request)
            self._refuse_duplicates(submissions)
            for submission in submissions:
                submission.site, submission.since = site, now
                name = submission.request.name
                if submission.request.kind is Kind.JOIN and self._deferred:
                    self._joining = submission  # not before what was submitted before it
                elif self._is_taken(name):
                    self._deferred.setdefault(name, deque()).append(submission)
                else:
                    self._in_flight[name] = submission
                    self._offer(submission.request)

    def submit_repeated(self, submission: Submission, follower: Follower) -> bool:
        """Take in an operation of the schedule that `follower` follows. False: it does not fit, and has not been.

        Nothing that is in flight then waits for anything, so most of what `submit` looks after cannot be.
        """
        request = submission.request
        submission.site, submission.since = call_site(), time.monotonic()
        with self._lock:
            if self._closed is not None or follower is not self._follower or self._new or self._joining is not None:
                return False
            if self._is_taken(request.name) or not follower.fits(request):
                return False
            before = follower.counter
            if not follower.accept(request):
                return False
            self._in_flight[request.name] = submission
            if follower.counter != before or len(self._in_flight) == 1:
                self.attention = True
        self._on_accepted(request)
        return True

    def submit_alone(self, request: Request, follower: Follower, values: NDArray[Any] | None) -> bool:
        """Take in what is all that `follower` runs next, while nothing else is in flight. False: it has not been.

        Ended by `leave_alone`, by the same thread, which drives meanwhile.
        """
        with self._lock:
            if (
                self._closed is not None
                or self._in_flight
                or self._new
                or self._joining
                or follower is not self._follower
                or not follower.accept_alone(request, values)
            ):
                return False
            self._alone = request
        self._on_accepted(request)
        return True

    def leave_alone(self, submission: Submission | None) -> None:
        """What came by `submit_alone` is done; or goes on as `submission`, like any other."""
        with self._lock:
            request, self._alone = self._alone, None
            assert request is not None
            if submission is not None:
                self._in_flight[request.name] = submission
            elif self._deferred:
                self._release(request.name)

    def poison(self, requests: Sequence[Request]) -> None:
        """Let the other ranks know, in one message, that this one cannot take part (`problem` says why)."""
        with self._lock:
            if self._closed is None:
                self.attention = True
                if self._follower is not None:
                    self._follower.break_off()
                self._new.extend(requests)

    def follow(self, follower: Follower | None) -> None:
        """From now on submit what fits to `follower`, beginning with what nobody has been told of."""
        if follower is self._follower:
            return
        with self._lock:
            self._follower = follower
            new, self._new = self._new, []
            for request in new:
                self._offer(request)

    def drain(self) -> list[Request]:
        """Return the Requests that nobody has been told of yet."""
        self.attention = False
        if not self._new:  # a racing submit is followed by a wake
            return []
        with self._lock:
            requests, self._new = self._new, []
        return requests

    def get(self, name: str) -> Submission | None:
        """Return what is in flight under `name`: None when this rank has joined, or was refused locally."""
        return self._in_flight.get(name)

    def oldest(self) -> Submission | None:
        """Return what has been in flight for longest. Not a join: it waits until all others are without data."""
        with self._lock:
            return next((s for s in self._in_flight.values() if s.request.kind is not Kind.JOIN), None)

    def finish(self, name: str, value: Any = None) -> None:
        """Hand the result over and free the name."""
        self._remove(name).handle.finish(value)

    def fail(self, name: str, error: BaseException) -> None:
        """Raise `error` at whoever waits for `name`, and free the name. Unknown names are ignored."""
        if name in self._in_flight:
            self._remove(name).handle.fail(error)

    def close(self, error: Callable[[Request], BaseException]) -> None:
        """Fail everything in flight, and every later submission, with a new `error(request)`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
            waiting = list(self._in_flight.values())
            waiting += [s for queue in self._deferred.values() for s in queue]
            waiting += [self._joining] if self._joining is not None else []
            self._left_behind = waiting
            self._joining = None
            self._in_flight.clear()
            self._deferred.clear()
            self._new.clear()
        for submission in waiting:
            submission.handle.fail(error(submission.request))

    @property
    def has_work(self) -> bool:
        """Whether anything is in flight, or has not been announced."""
        return bool(self._in_flight or self._new)

    @property
    def in_flight(self) -> dict[str, Submission]:
        """Not a copy; for the engine thread."""
        return self._in_flight

    def _remove(self, name: str) -> Submission:
        with self._lock:
            submission = self._in_flight.pop(name)
            self._release(name)
        return submission

    def _is_taken(self, name: str) -> bool:
        return name in self._in_flight or (self._alone is not None and self._alone.name == name)

    def _release(self, name: str) -> None:
        if name in self._deferred:
            following = self._deferred[name].popleft()
            if not self._deferred[name]:
                del self._deferred[name]
            self._in_flight[name] = following
            self._offer(following.request)
        if self._joining is not None and not self._deferred:
            joining, self._joining = self._joining, None
            self._in_flight[joining.request.name] = joining
            self._offer(joining.request)

    def _offer(self, request: Request) -> None:
        follower = self._follower
        if follower is None:
            self._new.append(request)
            self.attention = True
            return
        before = follower.counter
        if self._new or not follower.accept(request):  # what does not fit is heard in the order of submission
            follower.break_off()
            self._new.append(request)
            self.attention = True
            return
        if follower.counter != before or len(self._in_flight) == 1:  # the first: to hear of a rank that leaves
            self.attention = True
        self._on_accepted(request)

    def _refuse_duplicates(self, submissions: Sequence[Submission]) -> None:
        seen: set[str] = set()
        for submission in submissions:
            request = submission.request
            rivals = [self._in_flight[request.name]] if request.name in self._in_flight else []
            rivals += self._deferred.get(request.name, ())
            rivals += [self._joining] if self._joining is not None else []
            if self._alone is not None and self._alone[:2] == request[:2]:
                raise DuplicateNameError(request.name, "another thread")
            for rival in rivals:
                if rival.request.kind is request.kind:
                    raise DuplicateNameError(request.name, rival.where)
            if request.name in seen:
                raise DuplicateNameError(request.name, "the same group")
            seen.add(request.name)


def call_site() -> Site:
    """Return file and line of the nearest caller outside hvdlite and the frameworks that call its hooks."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_INSIDE) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
