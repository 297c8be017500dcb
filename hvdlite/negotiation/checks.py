"""Do the ranks agree? Pure: Requests in, one Response (or the reason why not) out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.dtypes import ReduceOp
from hvdlite.messages import Kind, Refusal, Request, Response

_SAME_SHAPE = frozenset({Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER})
_SIZED = frozenset({Kind.SHARED_BUFFER})
_SCALED = frozenset({Kind.ALLREDUCE, Kind.REDUCESCATTER})
_RAGGED = frozenset({Kind.ALLGATHER, Kind.ALLTOALL})
_ROOTED = frozenset({Kind.BROADCAST})
_SETS = frozenset({Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET})

Value = Callable[[Request, Sequence[int]], Any]  # of a request, given the global ranks of the set


def check(requests: Mapping[int, Request], joined: Sequence[int], members: Sequence[int]) -> Response:
    """Return what to run for one name.

    Args:
        requests: by set rank; all have one name. Ranks in `joined` have none.
        joined: set ranks that have joined.
        members: global rank of each set rank, for messages.
    """
    first = next(iter(requests.values()))
    if not joined and len(set(requests.values())) == 1 and not first.problem and first.kind not in _RAGGED:
        return _agreed(first, home=first.home)
    refusal = _first_refusal(requests, joined, members)
    if refusal is not None:
        return Response(first.kind, first.name, group=first.group, refusal=refusal)
    if first.kind is not Kind.ALLGATHER:
        return _agreed(first, joined=tuple(joined))
    sizes = tuple(requests[r].shape[0] if r in requests else 0 for r in range(len(members)))
    return _agreed(first, sizes=sizes, joined=tuple(joined))


def _agreed(
    request: Request, sizes: tuple[int, ...] = (), joined: tuple[int, ...] = (), home: tuple[int, ...] = ()
) -> Response:
    splits = () if request.kind is Kind.ALLTOALL else request.splits  # each rank's own there
    return Response(
        request.kind, request.name, request.dtype, request.shape, request.op, request.root, request.prescale,
        request.postscale, splits, request.device, request.group, sizes, joined, home=home,
    )  # fmt: skip


def _first_refusal(requests: Mapping[int, Request], joined: Sequence[int], members: Sequence[int]) -> Refusal | None:
    problem = wrong_somewhere(requests, members)
    if problem is not None:
        return problem
    first = next(iter(requests.values()))
    name = first.name
    for what, applies, value in _COMPARED:
        if not applies(first):
            continue
        found = _by_value(requests, members, value)
        if len(found) > 1:
            return Refusal("mismatch", name, what, found)
    if first.kind is Kind.BROADCAST and first.root in joined and first.root not in requests:
        root = members[first.root]
        return Refusal(
            "other", name, f"tensor {name!r}: broadcast from rank {root}, but rank {root} has joined (join())."
        )
    return None


def wrong_somewhere(requests: Mapping[int, Request], members: Sequence[int]) -> Refusal | None:
    """Return what ranks have found wrong with their own part, if any has. It needs not be complete."""
    problems = _by_value(requests, members, lambda r, _: r.problem)
    problems.pop("", None)
    return Refusal("remote", next(iter(requests.values())).name, by_value=problems) if problems else None


def _by_value(requests: Mapping[int, Request], members: Sequence[int], value: Value) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, request in sorted(requests.items()):
        found.setdefault(str(value(request, members)), []).append(members[rank])
    return found


def _always(_: Request) -> bool:
    return True


def _is_in(kinds: frozenset[Kind]) -> Callable[[Request], bool]:
    return lambda request: request.kind in kinds


# What must be equal, in the order in which a difference is reported: the one that explains most comes first.
_COMPARED: list[tuple[str, Callable[[Request], bool], Value]] = [
    ("operation", _always, lambda r, _: r.kind.name),
    ("dtype", _always, lambda r, _: r.dtype),
    ("shape", _is_in(_SAME_SHAPE), lambda r, _: str(list(r.shape))),
    ("size", _is_in(_SIZED), lambda r, _: f"{r.shape[0]} bytes"),
    ("number of dimensions", _is_in(_RAGGED), lambda r, _: len(r.shape)),
    ("shape beyond the first dimension", _is_in(_RAGGED), lambda r, _: str(list(r.shape[1:]))),
    ("reduce op", _is_in(_SCALED), lambda r, _: ReduceOp(r.op).name),
    ("prescale factor", _is_in(_SCALED), lambda r, _: repr(r.prescale)),
    ("postscale factor", _is_in(_SCALED), lambda r, _: repr(r.postscale)),
    ("root rank", _is_in(_ROOTED), lambda r, members: members[r.root]),
    ("ranks of the process set", _is_in(_SETS), lambda r, _: str(list(r.splits))),
    ("device", _always, lambda r, _: r.device),
    ("group", _always, lambda r, _: f"{r.group} of {r.group_size}" if r.group else "no group"),
]
