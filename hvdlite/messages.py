"""What ranks say to each other before they move data, and how it is written down.

Requests go up to the coordinator, Verdicts come down. Repeated ones are a
few integers (ids of responses that all ranks know); JSON carries what is new.
While a learned schedule runs (`negotiation.schedule`) nothing is said at all but how far each
rank has come; `Frozen` is what ends that. Nothing is pickled, so a message can never run code.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvdlite import errors
from hvdlite.config import Config
from hvdlite.dtypes import ReduceOp


class Kind(str, enum.Enum):
    """What an operation does."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"
    ADD_PROCESS_SET = "add_process_set"
    REMOVE_PROCESS_SET = "remove_process_set"
    SHARED_BUFFER = "shared_buffer"


_NUMBERED = ".noname."  # in names of operations that were given none


def nameless(kind: Kind | str, number: int) -> str:
    """Return the name under which the `number`-th operation without a name travels."""
    return f"{kind._value_ if isinstance(kind, Kind) else kind}{_NUMBERED}{number}"  # an Enum's `value` takes longer


JOIN_NAME = "hvdlite.join()"  # no tensor is called that; a joined rank takes part in a tensor called "join"


class Request(NamedTuple):
    """One rank's wish. Equal Requests of all ranks are served without being sent again.

    Attributes:
        dtype: name, as in `dtypes.SUPPORTED`; "" where no data moves.
        root: rank within the process set; -1 where there is none.
        splits: rows to each rank (alltoall) or global ranks (process sets).
        group: identity of the group that becomes ready as one, "" for none.
        group_size: members of that group.
        problem: why this rank cannot take part; set when its arguments were wrong.
        home: number of the shared buffer in which the tensor is reduced in place, and the byte where it begins; or ().
    """

    kind: Kind
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    device: str = "cpu"
    group: str = ""
    group_size: int = 0
    problem: str = ""
    home: tuple[int, ...] = ()


def number_of(request: Request | Response) -> int | None:
    """Return which operation of its kind without a name this is, or None if it has a name."""
    kind, separator, number = request.name.partition(_NUMBERED)
    return int(number) if separator and kind == request.kind.value and number.isdecimal() else None


class Refusal(NamedTuple):
    """An error that every rank gets under one name, before it is an exception."""

    kind: str
    tensor: str
    what: str = ""
    by_value: dict[str, list[int]] = {}  # noqa: RUF012  a tuple's field: nobody changes it
    remedy: str = ""

    def exception(self) -> errors.HvdliteError:
        """Return a new exception; each rank, and each handle, raises its own."""
        if self.kind == "mismatch":
            return errors.MismatchError(self.tensor, self.what, self.by_value, self.remedy)
        if self.kind == "remote":
            return errors.RemoteError(self.tensor, {r: text for text, ranks in self.by_value.items() for r in ranks})
        if self.kind == "stall":
            return errors.StallError(self.what)
        return errors.HorovodInternalError(self.what)


class Response(NamedTuple):
    """What all ranks of a set agreed to run under one name, or the error that they all get.

    Attributes:
        sizes: first dimension of each rank's tensor (allgather), in set-rank order.
        joined: set ranks that take part without a tensor of their own; of a refusal, those that have not asked yet.
        last_joined: set rank that joined last (join only).
        refusal: the error, if there is one; then nothing runs.
        home: as in the Requests, where it is the same on all ranks; else ().
    """

    kind: Kind
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    device: str = "cpu"
    group: str = ""
    sizes: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    last_joined: int = -1
    refusal: Refusal | None = None
    home: tuple[int, ...] = ()


class Knobs(NamedTuple):
    """How collectives run from some Verdict on. The defaults are the settings of these names; a tuner may change them.

    Attributes:
        fusion_threshold: largest fused buffer, bytes.
        shared_memory_piece: bytes of each rank in shared memory at a time.
        ring_chunk: bytes of a ring transfer at a time.
        small_message: up to this many bytes, ranks on several hosts take the way with the fewest steps.
        hierarchical: ranks of a host reduce among themselves first, where there are several hosts.
    """

    fusion_threshold: int
    shared_memory_piece: int
    ring_chunk: int
    small_message: int
    hierarchical: bool = True

    @classmethod
    def of(cls, config: Config) -> Knobs:
        """Return what the settings say."""
        return cls(*(getattr(config, name) for name in cls._fields))


@dataclass(slots=True)
class Announcement:
    """What one rank newly wants: ids that the cache knows, and Requests in full.

    Attributes:
        era: in which it was said; the coordinator has begun a new one if it ignores this.
        waiting: a caller waits for these before it submits more.
    """

    ids: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    era: int = 0
    waiting: bool = False


@dataclass(slots=True)
class Frozen:
    """One rank's last word in the era of a schedule: what it has submitted and not seen run.

    Attributes:
        counter: leading batches that it has submitted whole; what it has of them is not listed.
        ids, requests: the rest of it, in the order of submission.
        waited: how long the oldest of it has been waiting, seconds.
        awaited: a tensor for which a caller waits, although its batch is not whole; "" if none.
    """

    era: int
    counter: int
    ids: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    waited: float = 0.0
    awaited: str = ""


@dataclass(slots=True)
class Schedule:
    """What every rank runs from here on, again and again, without asking.

    Attributes:
        batches: of ids of cached Responses, or Responses of operations without a name.
        starts: by kind of operation, the number that the first operation without a name has.
        patience: a rank leaves the schedule when a batch has been incomplete there for this long, seconds.
    """

    batches: list[list[int | Response]]
    starts: dict[str, int] = field(default_factory=dict)
    patience: float = 0.0


@dataclass(slots=True)
class Verdict:
    """What every rank of the set runs next, in this order.

    Attributes:
        entries: ids of cached Responses, or new Responses.
        new_ids: id given to each new Response, by name; those without one are not cached.
        evicted: ids that every rank forgets, after the entries have been looked up.
        shutdown: why the set stops after these entries; "" when it goes on.
        fusion_threshold: bytes; equal everywhere because it travels here.
        knobs: what runs differently from these entries on; None when nothing changes.
        era: the one that begins after these entries, if `end` or `schedule` says so.
        end: where the schedule ended: so many batches are run before the entries. -1 if none ended.
        schedule: what begins after the entries, or None.
    """

    entries: list[int | Response] = field(default_factory=list)
    new_ids: dict[str, int] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)
    shutdown: str = ""
    fusion_threshold: int = 0
    knobs: Knobs | None = None
    era: int = 0
    end: int = -1
    schedule: Schedule | None = None


class Tag(bytes, enum.Enum):
    """First byte of a control message."""

    ANNOUNCE = b"A"
    VERDICT = b"V"
    GOODBYE = b"G"  # this rank wants to stop the set
    FAREWELL = b"F"  # this rank has heard that the set stops, and says nothing more
    COUNTER = b"C"  # how far this rank has come in a schedule
    FREEZE = b"X"  # from the coordinator: the schedule ends
    FROZEN = b"Z"
    STALL_QUERY = b"Q"
    STALL_REPORT = b"R"


_HEAD = struct.Struct("<cqI")  # tag, fusion threshold, number of ids
_COUNTER = struct.Struct("<cq")
_NEW = -1  # stands in the list of ids for "the next response of the tail"


def encode_announcement(said: Announcement) -> bytes:
    head = _HEAD.pack(Tag.ANNOUNCE, said.era << 1 | said.waiting, len(said.ids)) + _pack_ids(said.ids)
    return head + _dump(said.requests) if said.requests else head


def decode_announcement(message: bytes) -> Announcement:
    said, ids, tail = _split(message)
    requests = [_request_from_json(r) for r in json.loads(tail)] if tail else []
    return Announcement(ids, requests, said >> 1, bool(said & 1))


def encode_frozen(said: Frozen) -> bytes:
    head = _HEAD.pack(Tag.FROZEN, said.era, len(said.ids)) + _pack_ids(said.ids)
    return head + _dump([said.counter, said.requests, said.waited, said.awaited])


def decode_frozen(message: bytes) -> Frozen:
    era, ids, tail = _split(message)
    counter, requests, waited, awaited = json.loads(tail)
    return Frozen(era, counter, ids, [_request_from_json(r) for r in requests], waited, awaited)


def encode_counter(value: int, enclosed: bytes = b"") -> bytes:
    """Write how far a rank has come, and what it gives to the last batch that this covers, if that travels along."""
    return _COUNTER.pack(Tag.COUNTER, value) + enclosed


def decode_counter(message: bytes) -> tuple[int, bytes]:
    return int(_COUNTER.unpack_from(message)[1]), message[_COUNTER.size :]


def encode_verdict(verdict: Verdict) -> bytes:
    new = [entry for entry in verdict.entries if not isinstance(entry, int)]
    ids = [entry if isinstance(entry, int) else _NEW for entry in verdict.entries]
    head = _HEAD.pack(Tag.VERDICT, verdict.fusion_threshold, len(ids)) + _pack_ids(ids)
    if not (new or verdict.evicted or verdict.shutdown or verdict.knobs or verdict.era):
        return head
    tail: list[Any] = [new, verdict.new_ids, verdict.evicted, verdict.shutdown, verdict.knobs]
    if verdict.era:
        schedule = verdict.schedule
        tail += [verdict.era, verdict.end, schedule and [schedule.batches, schedule.starts, schedule.patience]]
    return head + _dump(tail)


def decode_verdict(message: bytes) -> Verdict:
    threshold, ids, tail = _split(message)
    new, new_ids, evicted, shutdown, knobs, *more = json.loads(tail) if tail else ([], {}, [], "", None)
    responses = iter(new)
    entries = [_response_from_json(next(responses)) if i == _NEW else i for i in ids]
    verdict = Verdict(entries, new_ids, evicted, shutdown, threshold, Knobs(*knobs) if knobs else None)
    if more:
        verdict.era, verdict.end, schedule = more
        if schedule:
            batches, starts, patience = schedule
            verdict.schedule = Schedule([[_slot_from_json(slot) for slot in b] for b in batches], starts, patience)
    return verdict


def encode_json(tag: Tag, value: Any) -> bytes:
    """Write the rare messages: goodbye, stall query, stall report."""
    return tag + _dump(value)


def decode_json(message: bytes) -> Any:
    return json.loads(message[1:])


def _pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _split(message: bytes) -> tuple[int, list[int], bytes]:
    _, threshold, n = _HEAD.unpack_from(message)
    start = _HEAD.size
    end = start + 4 * n
    return threshold, list(struct.unpack_from(f"<{n}i", message, start)), message[end:]


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _slot_from_json(slot: int | list[Any]) -> int | Response:
    return slot if isinstance(slot, int) else _response_from_json(slot)


def _request_from_json(fields: list[Any]) -> Request:
    kind, name, dtype, shape, op, root, prescale, postscale, splits, device, group, group_size, problem, home = fields
    return Request(
        Kind(kind), name, dtype, tuple(shape), ReduceOp(op), root, prescale, postscale, tuple(splits),
        device, group, group_size, problem, tuple(home),
    )  # fmt: skip


def _response_from_json(fields: list[Any]) -> Response:
    kind, name, dtype, shape, op, root, pre, post, splits, device, group, sizes, joined, last, refusal, home = fields
    return Response(
        Kind(kind), name, dtype, tuple(shape), ReduceOp(op), root, pre, post, tuple(splits),
        device, group, tuple(sizes), tuple(joined), last, Refusal(*refusal) if refusal else None, tuple(home),
    )  # fmt: skip
