"""What ranks say to each other before they move data, and how it is written down.

Requests go up to the coordinator, Verdicts come down. In steady state both are a
few integers (ids of responses that all ranks know); JSON carries what is new.
Nothing is pickled, so a message can never run code.
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
    """What one rank newly wants: ids that the cache knows, and Requests in full."""

    ids: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


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
    """

    entries: list[int | Response] = field(default_factory=list)
    new_ids: dict[str, int] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)
    shutdown: str = ""
    fusion_threshold: int = 0
    knobs: Knobs | None = None


class Tag(bytes, enum.Enum):
    """First byte of a control message."""

    ANNOUNCE = b"A"
    VERDICT = b"V"
    GOODBYE = b"G"  # this rank wants to stop the set
    FAREWELL = b"F"  # this rank has heard that the set stops, and says nothing more
    STALL_QUERY = b"Q"
    STALL_REPORT = b"R"


_HEAD = struct.Struct("<cqI")  # tag, fusion threshold, number of ids
_NEW = -1  # stands in the list of ids for "the next response of the tail"


def encode_announcement(said: Announcement) -> bytes:
    head = _HEAD.pack(Tag.ANNOUNCE, 0, len(said.ids)) + _pack_ids(said.ids)
    return head + _dump([_request_to_json(r) for r in said.requests]) if said.requests else head


def decode_announcement(message: bytes) -> Announcement:
    _, ids, tail = _split(message)
    return Announcement(ids, [_request_from_json(r) for r in json.loads(tail)] if tail else [])


def encode_verdict(verdict: Verdict) -> bytes:
    new = [entry for entry in verdict.entries if not isinstance(entry, int)]
    ids = [entry if isinstance(entry, int) else _NEW for entry in verdict.entries]
    head = _HEAD.pack(Tag.VERDICT, verdict.fusion_threshold, len(ids)) + _pack_ids(ids)
    if not (new or verdict.evicted or verdict.shutdown or verdict.knobs):
        return head
    return head + _dump([new, verdict.new_ids, verdict.evicted, verdict.shutdown, verdict.knobs])


def decode_verdict(message: bytes) -> Verdict:
    threshold, ids, tail = _split(message)
    new, new_ids, evicted, shutdown, knobs = json.loads(tail) if tail else ([], {}, [], "", None)
    responses = iter(new)
    entries = [_response_from_json(next(responses)) if i == _NEW else i for i in ids]
    return Verdict(entries, new_ids, evicted, shutdown, threshold, Knobs(*knobs) if knobs else None)


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


def _request_to_json(request: Request) -> list[Any]:
    return list(request)


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
