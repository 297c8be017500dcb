"""The short way of an allreduce that a caller waits for, where the ranks have learned that nothing else comes next.

The caller's thread does it all, and leaves out what operations in any order need. What is small goes into a cell of
shared memory before the rank shows its number (`negotiation.board`): who has seen the numbers of all ranks
has all values, so that agreement and data take one wait together. Each rank then adds them up, in rank order.

A rank that comes by the general way shows no values; then all ranks notice, and reduce as they do elsewhere.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from hvdlite.comm.arena import Home
from hvdlite.engine.cycle import Cycle
from hvdlite.engine.inbox import Inbox
from hvdlite.engine.ways import How
from hvdlite.messages import Kind, Request, Response
from hvdlite.negotiation.follower import Follower
from hvdlite.negotiation.negotiator import Negotiator

Array = NDArray[Any]


# What lies in shared memory anyway is better reduced there from 256 KiB on: 512 KiB in 80 instead of 110 us.
_COST_OF_HOME = 2


class ShortWay:
    """Of one engine. For whoever drives it."""

    def __init__(self, negotiator: Negotiator, cycle: Cycle, inbox: Inbox) -> None:
        self._negotiator, self._cycle, self._inbox = negotiator, cycle, inbox

    def enter(self, request: Request, source: Array, follower: Follower) -> How | None:
        """Submit `request` if it is all that comes next. None: it is not, and nothing has been done.

        Args:
            source: flat.
        """
        how = self._cycle.ways.how_one(request[2], request[3], request[4], *request[6:8])
        cost = how.cost * (_COST_OF_HOME if request.home else 1)
        shown = source if cost <= follower.most_shown else None
        return how if self._inbox.submit_alone(request, follower, shown) else None

    def run(
        self, request: Request, how: How, source: Array, target: Array, follower: Follower, home: Home | None
    ) -> bool:
        """Run what has been entered. False if other ranks have not come yet: then it becomes a Submission."""
        response = self._negotiator.take_alone(follower, request)
        if response is None:
            return False
        self._cycle.allreduce_one(response, how, source, target, self._shown(how, target, follower), home)
        self._inbox.leave_alone(None)
        return True

    def run_late(self, response: Response, follower: Follower) -> bool:
        """Run a batch of the schedule for which all ranks have shown their values. False: they have not."""
        submission = self._inbox.get(response.name) if response.kind is Kind.ALLREDUCE else None
        if submission is None or submission.source is None or submission.target is None:
            return False
        how = self._cycle.ways.how_one(response[2], response[3], response[4], *response[6:8])
        target = submission.target.host()
        shown = self._shown(how, target, follower)
        if shown is None:
            return False
        self._cycle.allreduce_one(response, how, submission.source.host(), target, shown)
        self._inbox.finish(response.name, submission.value)
        return True

    def _shown(self, how: How, target: Array, follower: Follower) -> list[Array] | None:
        return follower.shown(how.dtype, target.size) if how.cost <= follower.most_shown else None
