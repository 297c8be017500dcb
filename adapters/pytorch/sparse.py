"""Allreduce of sparse tensors: every rank gets the entries of all ranks, by allgather.

    bytes received per rank    sum over the ranks of nnz * (8 sparse_dim + bytes of one value)

Worth it while that is less than the dense tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from hvdlite import InvalidRequestError, MismatchError, ProcessSet, UnsupportedDtypeError, global_process_set, rank
from hvdlite.lowlevel import GroupHandle, Kind, ReduceOp, name_for, refusing, start

from .ops import Reduction, reduction_for
from .tensors import to_gathered


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to add up, or average, sparse tensors. Collective. Builds no graph.

    Args:
        tensor: COO, in host memory. Shape, number of sparse dimensions and dtype are equal on all ranks;
            how many entries there are is not, and may be 0. It need not be coalesced.
        name: two operations travel, as `<name>.indices` and `<name>.values`.
        op: Sum or Average. Averages of integers truncate each entry towards zero.

    Returns:
        A function that waits for the result: a new tensor with the entries of rank 0, then rank 1, …, where an
        index may come more than once (`coalesce()` adds these up). The same bits on all ranks.
    """
    name = name_for("sparse_allreduce", name, process_set)
    reduction = reduction_for(Kind.ALLGATHER, _names(name), op, None, 1.0, 1.0, process_set)
    handle = start_sparse_allreduce(tensor, name, reduction)
    handle.alert()
    return handle.wait


def start_sparse_allreduce(tensor: torch.Tensor, name: str, reduction: Reduction) -> GroupHandle:
    """Submit `tensor`, and return the handle of the sparse result. See `sparse_allreduce_async`."""
    op, prescale, postscale, process_set = reduction
    with refusing(Kind.ALLGATHER, _names(name), process_set):
        local = _checked(tensor, op).detach().coalesce()  # duplicates need not travel
        size = process_set.size()
        assert size is not None  # refusing() has looked the set up
        mean_of = size if op is ReduceOp.AVERAGE else 1
        values = to_gathered(_scaled(local.values(), prescale * postscale, mean_of).reshape(-1))
        header = _Header(rank(), op, local._nnz(), local.sparse_dim(), local.ndim)
        indices = to_gathered(torch.cat([torch.tensor([*header, *local.shape]), local.indices().t().reshape(-1)]))
    handles = start(Kind.ALLGATHER, _names(name), [indices, values], process_set, grouped=False)
    return GroupHandle(handles, functools.partial(_assemble, name))


class _Header(NamedTuple):
    """What stands before the shape and the indices of a rank, all int64."""

    rank: int
    op: int
    nnz: int
    sparse_dim: int
    ndim: int


def _names(name: str) -> list[str]:
    return [f"{name}.indices", f"{name}.values"]


def _checked(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    layout = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    if layout is not torch.sparse_coo:
        raise InvalidRequestError(
            f"sparse allreduce: expected a tensor of layout torch.sparse_coo, got {layout}: {tensor!r:.80}. "
            "Dense tensors go through allreduce."
        )
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise InvalidRequestError(f"sparse allreduce: op={op.name.title()}: expected Sum or Average.")
    if tensor.dtype is torch.bool:
        raise UnsupportedDtypeError(f"sparse allreduce: {op.name.title()} of bool has no one meaning; cast to int32.")
    return tensor


def _scaled(values: torch.Tensor, factor: float, divisor: int) -> torch.Tensor:
    # Here, and not after the gather: each rank does its own entries only, and all ranks get the same bits.
    if factor != 1.0:
        values = (values * factor).to(values.dtype)
    if divisor == 1:
        return values
    exact = values.is_floating_point() or values.is_complex()
    return torch.div(values, divisor, rounding_mode=None if exact else "trunc")


def _assemble(name: str, gathered: list[torch.Tensor]) -> torch.Tensor:
    """Return the sparse tensor of all entries, or raise, on every rank, because the ranks' tensors differ."""
    message, values = gathered
    indices: list[torch.Tensor] = []
    kinds: dict[str, list[int]] = {}  # how tensors look, and on which ranks
    start = 0
    while start < len(message):  # ranks that have joined sent nothing
        shape_at = start + len(_Header._fields)
        header = _Header(*message[start:shape_at].tolist())
        begin = shape_at + header.ndim
        start = begin + header.nnz * header.sparse_dim
        shape = message[shape_at:begin].tolist()
        indices.append(message[begin:start].view(header.nnz, header.sparse_dim))
        kind = f"{shape} with sparse_dim {header.sparse_dim}, {ReduceOp(header.op).name.title()}"
        kinds.setdefault(kind, []).append(header.rank)
    if len(kinds) > 1:
        raise MismatchError(name, "shape or op", kinds)
    every = torch.cat(indices).t()
    # A copy: memory that NumPy has seen cannot be resized, as adding to a sparse tensor in place does.
    values = values.view(every.shape[1], *shape[header.sparse_dim :]).clone()
    return torch.sparse_coo_tensor(every, values, shape, check_invariants=False)
