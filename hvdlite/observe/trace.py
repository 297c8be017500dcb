"""From what the engines report to Chrome trace events, one line of JSON each. Pure.

The layout is Horovod's, so that scripts that read its timeline read this one: every tensor is a "process",
with a span of negotiation in which each rank is a point, then a span of execution with the activities
inside. Spans are balanced even if a report was missed: what is still open is closed first, and when the
recording ends. A full disc, or a signal that ends the process, leaves them open.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdlite.dtypes import ReduceOp
from hvdlite.messages import Kind, Request, Response
from hvdlite.observe.instrument import Operation

_REMEMBERED = 1024  # results as text
_CALLERS = ',"pid":0,"tid":1'  # the row of those who wait
# The others only bring the ranks together, and are over with the negotiation.
_EXECUTED = frozenset({Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER})


@dataclass(slots=True)
class _Track:
    """The row of one tensor.

    Attributes:
        tail: what its events end with.
        depth: spans that are open.
        negotiating: whether the open one is the negotiation.
    """

    tail: str
    depth: int = 0
    negotiating: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where reports come from: a process set, as one of its ranks.

    Attributes:
        label: shown behind the names of its tensors; "" for the set of all ranks.
    """

    label: str
    members: tuple[int, ...]
    set_rank: int


class Trace:
    """Collects events in `lines`, to be taken by whoever writes them. Moments are in seconds of one clock.

    Args:
        start: the moment that is 0 in the trace.
        epoch: the same moment in microseconds since 1970, to lay the traces of several ranks over each other.
        rank: whose trace it is.
    """

    def __init__(self, start: float, epoch: int, rank: int) -> None:
        self._start = start
        self._tracks: dict[str, dict[str, _Track]] = {}  # by label and name
        self._n_tracks = 0
        self._shows_waiting = False
        self._running: dict[str, Sequence[Response]] = {}  # by label
        about = f'"start_time_since_epoch_in_micros":{epoch},"rank":{rank}'
        self.lines = [f'{{"name":"process_name","ph":"M","pid":0,"args":{{{about}}}}}', _sort_index(0)]

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def heard(self, moment: float, place: Place, set_rank: int, requests: Iterable[Request]) -> None:
        """A rank has asked for something."""
        ts, rank = self._ts(moment), place.members[set_rank]
        for request in requests:
            track = self._track(place, request.name)
            if not track.negotiating:
                self._close(track, ts)
                self._open(track, ts, f"NEGOTIATE_{_label(request)}")
                track.negotiating = True
            self.lines.append(f'{{"ph":"X","name":"{rank}","ts":{ts},"dur":0{track.tail}}}')

    def answered(self, moment: float, place: Place, responses: Iterable[Response], mark_cycle: bool) -> None:
        """All ranks know what runs now, or why it does not."""
        ts = self._ts(moment)
        if mark_cycle:
            self.lines.append(f'{{"ph":"i","name":"CYCLE_START","ts":{ts},"s":"g"}}')
        for response in responses:
            track = self._track(place, response.name)
            if track.negotiating:
                self._close(track, ts)
            if response.refusal is not None:
                why = json.dumps({"error": str(response.refusal.exception())})
                self.lines.append(f'{{"ph":"B","name":"ERROR","ts":{ts}{track.tail},"args":{why}}}')
                self.lines.append(f'{{"ph":"E","ts":{ts}{track.tail}}}')

    def began(self, moment: float, place: Place, responses: Sequence[Response]) -> None:
        """One collective starts for all of `responses`."""
        if responses[0].kind not in _EXECUTED:
            return
        ts = self._ts(moment)
        self._running[place.label] = responses
        for response in responses:
            track = self._track(place, response.name)
            self._close(track, ts)
            self._open(track, ts, _label(response))

    def activity(self, moment: float, place: Place, name: str) -> None:
        """What runs does `name` from here on."""
        ts = self._ts(moment)
        for response in self._running.get(place.label, ()):
            track = self._track(place, response.name)
            if track.depth > 1:
                self._end(track, ts)
            self._open(track, ts, name)

    def ran(self, moment: float, place: Place, operation: Operation) -> None:
        """What runs is done."""
        ts = self._ts(moment)
        for response in self._running.pop(place.label, ()):
            track = self._track(place, response.name)
            if track.depth > 1:
                self._end(track, ts)
            self._end(track, ts, _result(response.dtype, _result_shape(response, place, operation)))

    def waited(self, moment: float, since: float) -> None:
        """Callers have waited from `since` until `moment`: what ran meanwhile was not hidden."""
        if not self._shows_waiting:
            self._shows_waiting = True
            self.lines.append(f'{{"name":"thread_name","ph":"M"{_CALLERS},"args":{{"name":"callers wait"}}}}')
        self.lines.append(f'{{"ph":"B","name":"WAIT","ts":{self._ts(since)}{_CALLERS}}}')
        self.lines.append(f'{{"ph":"E","ts":{self._ts(moment)}{_CALLERS}}}')

    def ended(self, moment: float, place: Place) -> None:
        """Nothing more comes from `place`; what is open there has failed."""
        self._running.pop(place.label, None)
        for track in self._tracks.get(place.label, {}).values():
            self._close(track, self._ts(moment))

    def finish(self, moment: float) -> None:
        """Nothing more comes from anywhere, or something is missing: close what is open."""
        self._running.clear()
        for tracks in self._tracks.values():
            for track in tracks.values():
                self._close(track, self._ts(moment))

    def dropped(self, moment: float, n: int) -> None:
        """`n` reports are missing here."""
        ts = self._ts(moment)
        self.finish(moment)
        self.lines.append(f'{{"ph":"i","name":"DROPPED","ts":{ts},"s":"g","args":{{"reports":{n}}}}}')

    def _ts(self, moment: float) -> int:
        return max(0, int((moment - self._start) * 1e6))

    def _track(self, place: Place, name: str) -> _Track:
        tracks = self._tracks.get(place.label)
        if tracks is None:
            tracks = self._tracks[place.label] = {}
        track = tracks.get(name)
        if track is None:
            self._n_tracks = pid = self._n_tracks + 1
            track = tracks[name] = _Track(f',"pid":{pid}')
            shown = json.dumps(f"{name} [{place.label}]" if place.label else name)
            self.lines.append(f'{{"name":"process_name","ph":"M","pid":{pid},"args":{{"name":{shown}}}}}')
            self.lines.append(_sort_index(pid))
        return track

    def _open(self, track: _Track, ts: int, name: str) -> None:
        track.depth += 1
        self.lines.append(f'{{"ph":"B","name":"{name}","ts":{ts}{track.tail}}}')

    def _end(self, track: _Track, ts: int, more: str = "") -> None:
        track.depth -= 1
        self.lines.append(f'{{"ph":"E","ts":{ts}{track.tail}{more}}}')

    def _close(self, track: _Track, ts: int) -> None:
        while track.depth:
            self._end(track, ts)
        track.negotiating = False


def _sort_index(pid: int) -> str:
    return f'{{"name":"process_sort_index","ph":"M","pid":{pid},"args":{{"sort_index":{pid}}}}}'


def _label(what: Request | Response) -> str:
    return "ADASUM" if what.op is ReduceOp.ADASUM else what.kind.upper()


@functools.lru_cache(_REMEMBERED)
def _result(dtype: str, shape: tuple[int, ...]) -> str:
    return f',"args":{{"dtype":"{dtype}","shape":"{list(shape)}"}}'


def _result_shape(response: Response, place: Place, operation: Operation) -> tuple[int, ...]:
    if response.kind is Kind.ALLGATHER:
        return (sum(response.sizes), *response.shape[1:])
    if response.kind is Kind.ALLTOALL:
        return (operation.received, *response.shape[1:])
    if response.kind is Kind.REDUCESCATTER:
        rows, more = divmod(response.shape[0], len(place.members))
        return (rows + (place.set_rank < more), *response.shape[1:])
    return response.shape  # of the other kinds the input and the result are alike
