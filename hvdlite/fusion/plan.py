"""Which agreed tensors travel together. Pure: the same on every rank, without talking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from hvdlite.dtypes import SUPPORTED
from hvdlite.messages import Kind, Response

# A broadcast has its own root, and an alltoall its own splits; a barrier has nothing to fuse.
_FUSED = frozenset({Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCESCATTER})


@dataclass(slots=True)
class FusionPlan:
    """Responses that are run as one collective.

    Attributes:
        nbytes: size of the fused buffer, each tensor padded to the alignment.
    """

    responses: list[Response] = field(default_factory=list)
    nbytes: int = 0

    @property
    def kind(self) -> Kind:
        return self.responses[0].kind


def plan_fusion(
    responses: Sequence[Response], threshold: int, align: int = 64, groups_apart: bool = False
) -> list[FusionPlan]:
    """Split `responses` into plans of at most `threshold` bytes each.

    Tensors are joined that one collective can serve: same kind, dtype, device, op and factors.
    A tensor joins the last plan of its sort if there is room; plans keep the order of their
    first tensors, because every rank must build the same plans from the same list.

    Args:
        responses: in the order of the Verdict; none is a refusal.
        threshold: largest fused buffer, bytes. A larger tensor gets a plan of its own. 0 turns fusion off.
        align: each tensor takes a multiple of this many bytes, so that it can start aligned.
        groups_apart: fuse only within a group.
    """
    plans: list[FusionPlan] = []
    open_plans: dict[tuple[object, ...], FusionPlan] = {}
    for response in responses:
        nbytes = -(-response_bytes(response) // align) * align
        key = _sort_of(response, groups_apart)
        plan = open_plans.get(key) if key else None
        if plan is None or plan.nbytes + nbytes > threshold:
            plan = FusionPlan()
            plans.append(plan)
            if key:
                open_plans[key] = plan
        plan.responses.append(response)
        plan.nbytes += nbytes
    return plans


def response_bytes(response: Response) -> int:
    """Return how many bytes the result has on each rank (the input, for a reducescatter or alltoall)."""
    if not response.dtype:
        return 0
    itemsize = SUPPORTED[response.dtype].itemsize
    if response.kind is Kind.ALLGATHER:
        return sum(response.sizes) * prod(response.shape[1:]) * itemsize
    return prod(response.shape) * itemsize


def _sort_of(response: Response, groups_apart: bool) -> tuple[object, ...] | None:
    if response.kind not in _FUSED or (groups_apart and not response.group):
        return None
    group = response.group if groups_apart else ""
    if response.kind is Kind.ALLGATHER:
        return (response.kind, response.dtype, response.device, group)
    return (
        response.kind, response.dtype, response.device, response.op, response.prescale, response.postscale, group,
        response.home[:1],
    )  # fmt: skip
