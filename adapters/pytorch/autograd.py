"""The differentiable operations: allreduce, allgather, broadcast, alltoall, reducescatter, and their groups.

Backward passes are collective as well: every rank must run them, in the same order. The
gradient of an operation named `x` travels as `x.gradient`. Averages, not sums, of the
ranks' gradients come back from allgather and broadcast, as in Horovod: right for a loss
that is itself averaged over the ranks. Gradients can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from hvdlite import Average, InvalidRequestError, ProcessSet, global_process_set, rank
from hvdlite.lowlevel import GroupHandle, Kind, ReduceOp, name_for, refusing

from .at_once import reduce_at_once
from .compression import Compression, Compressor, check_compressor
from .ops import (
    Reduction,
    Tensors,
    names_of_group,
    reduction_for,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from .tensors import as_splits, to_new

Results = tuple[torch.Tensor, ...]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return postscale * reduce(prescale * tensor) over the ranks of the set: the same bits on all of them.

    Differentiable for Sum and Average: the gradient is reduced in the same way.

    Args:
        tensor: any shape and strides; shape and dtype equal on all ranks.
        average: Horovod's old way to say op=Average (True) or op=Sum (False).
        compression: what the tensor is turned into to travel.
        op: Average (default), Sum, Min, Max, Product or Adasum. Averages of integers truncate towards zero;
            float16 and bfloat16 are added in float32 and rounded once.
    """
    name = name_for(Kind.ALLREDUCE, name, process_set)
    if average is None and compression is Compression.none:
        output = reduce_at_once(tensor, name, op, prescale_factor, postscale_factor, process_set, in_place=False)
        if output is not None:
            return output
    reduction = reduction_for(Kind.ALLREDUCE, [name], op, average, prescale_factor, postscale_factor, process_set)
    return _compressed(Kind.ALLREDUCE, [tensor], [name], reduction, compression)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Like `allreduce` on each of `tensors`, which become ready together: all are reduced, or all raise."""
    names = names_of_group("grouped_allreduce", name, tensors, process_set)
    reduction = reduction_for(Kind.ALLREDUCE, names, op, average, prescale_factor, postscale_factor, process_set)
    return _compressed(Kind.ALLREDUCE, tensors, names, reduction, compression)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce `tensor` over the ranks, and return this rank's rows of the result. Differentiable.

    Args:
        tensor: at least one dimension; shape and dtype equal on all ranks. Of its n rows, the first n % size
            ranks get n // size + 1 and the others n // size, in rank order.
        op: Average (default) or Sum.
    """
    names = [name_for(Kind.REDUCESCATTER, name, process_set)]
    reduction = reduction_for(Kind.REDUCESCATTER, names, op, None, prescale_factor, postscale_factor, process_set)
    return _compressed(Kind.REDUCESCATTER, [tensor], names, reduction, compression)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Like `reducescatter` on each of `tensors`, which become ready together."""
    names = names_of_group("grouped_reducescatter", name, tensors, process_set)
    reduction = reduction_for(Kind.REDUCESCATTER, names, op, None, prescale_factor, postscale_factor, process_set)
    return _compressed(Kind.REDUCESCATTER, tensors, names, reduction, compression)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order. Differentiable.

    Args:
        tensor: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype may not.
    """
    return gather_tensors([tensor], [name_for(Kind.ALLGATHER, name, process_set)], process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Results:
    """Like `allgather` on each of `tensors`, which become ready together."""
    return gather_tensors(tensors, names_of_group("grouped_allgather", name, tensors, process_set), process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return `tensor` of rank `root_rank` on all ranks. Differentiable: the root gets the average gradient.

    Args:
        tensor: shape and dtype equal on all ranks; the values count on the root only.
        root_rank: a global rank, also within a process set.
    """
    name = name_for(Kind.BROADCAST, name, process_set)
    if _wants_graph([tensor]):
        output: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
        return output
    return _wait_one(start_broadcast(tensor, root_rank, name, process_set, to_new))


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to every rank, and return the rows that came from them, in rank order. Differentiable.

    Args:
        tensor: at least one dimension; all but the first are equal on all ranks, as is the dtype.
        splits: rows for each rank of the set; may be 0, and rows beyond their sum stay here. None cuts evenly.

    Returns:
        The tensor; with `splits` the pair (tensor, received splits).
    """
    name = name_for(Kind.ALLTOALL, name, process_set)
    if _wants_graph([tensor]):
        output, received = _Alltoall.apply(tensor, splits, name, process_set)
    else:
        output, received = start_alltoall(tensor, splits, name, process_set).wait()
    return output if splits is None else (output, received)


# With a graph where one is wanted


def reduce_tensors(tensors: Tensors, names: Sequence[str], reduction: Reduction) -> Results:
    """Allreduce, or a group of them."""
    if _wants_graph(tensors):
        return _as_results(_Allreduce.apply(names, reduction, *tensors))
    return _wait_all(GroupHandle(start_allreduce(tensors, names, reduction, to_new), tuple))


def scatter_tensors(tensors: Tensors, names: Sequence[str], reduction: Reduction) -> Results:
    """Reducescatter, or a group of them."""
    if _wants_graph(tensors):
        return _as_results(_Reducescatter.apply(names, reduction, *tensors))
    return _wait_all(GroupHandle(start_reducescatter(tensors, names, reduction), tuple))


def gather_tensors(tensors: Tensors, names: Sequence[str], process_set: ProcessSet) -> Results:
    """Allgather, or a group of them."""
    if _wants_graph(tensors):
        return _as_results(_Allgather.apply(names, process_set, *tensors))
    return _wait_all(GroupHandle(start_allgather(tensors, names, process_set), tuple))


class _Allreduce(Function):
    @staticmethod
    def forward(ctx: Any, names: Sequence[str], reduction: Reduction, *tensors: torch.Tensor) -> Results:
        ctx.names, ctx.reduction = names, reduction
        return _wait_all(GroupHandle(start_allreduce(tensors, names, reduction, to_new), tuple))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op = ctx.reduction.op
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise InvalidRequestError(
                f"allreduce of tensor {ctx.names[0]!r}: op={op.name.title()} has no gradient here. "
                "Use Sum or Average where one is needed, or detach() the tensor."
            )
        return None, None, *reduce_tensors(gradients, _gradient_names(ctx.names), ctx.reduction)


class _Reducescatter(Function):
    @staticmethod
    def forward(ctx: Any, names: Sequence[str], reduction: Reduction, *tensors: torch.Tensor) -> Results:
        ctx.names, ctx.reduction = names, reduction
        return _wait_all(GroupHandle(start_reducescatter(tensors, names, reduction), tuple))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, prescale, postscale, process_set = ctx.reduction
        factor = prescale * postscale * (process_set.size() if op is ReduceOp.SUM else 1)
        scaled = [gradient * factor for gradient in gradients]
        return None, None, *gather_tensors(scaled, _gradient_names(ctx.names), process_set)


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, names: Sequence[str], process_set: ProcessSet, *tensors: torch.Tensor) -> Results:
        ctx.names, ctx.process_set = names, process_set
        ctx.rows = [len(tensor) if tensor.ndim else 0 for tensor in tensors]
        return _wait_all(GroupHandle(start_allgather(tensors, names, process_set), tuple))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        names, process_set = _gradient_names(ctx.names), ctx.process_set
        average = Reduction(ReduceOp.AVERAGE, 1.0, 1.0, process_set)
        averages = reduce_tensors(gradients, names, average)
        everyone = gather_tensors([torch.tensor([ctx.rows])], [f"{names[0]}.rows"], process_set)[0]
        starts = everyone[: process_set.rank()].sum(0).tolist()
        mine = [g.narrow(0, start, rows) for g, start, rows in zip(averages, starts, ctx.rows, strict=True)]
        return None, None, *mine


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str, process_set: ProcessSet) -> torch.Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return _wait_one(start_broadcast(tensor, root_rank, name, process_set, to_new))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        average = Reduction(ReduceOp.AVERAGE, 1.0, 1.0, ctx.process_set)
        (gradient,) = reduce_tensors(gradients, _gradient_names([ctx.name]), average)
        mine = gradient if rank() == ctx.root_rank else torch.zeros_like(gradient)
        return mine, None, None, None


class _Alltoall(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str, process_set: ProcessSet) -> Results:
        output, received = start_alltoall(tensor, splits, name, process_set).wait()
        ctx.mark_non_differentiable(received)
        ctx.name, ctx.process_set = name, process_set
        ctx.received = received.tolist()
        sent = as_splits(splits)
        ctx.kept = len(tensor) - sum(sent) if sent else 0
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (name,) = _gradient_names([ctx.name])
        back, _ = alltoall(gradients[0], ctx.received, name, ctx.process_set)
        if ctx.kept:  # rows that were not sent had no influence
            back = torch.cat([back, back.new_zeros(ctx.kept, *back.shape[1:])])
        return back, None, None, None


def _wants_graph(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def _gradient_names(names: Sequence[str]) -> list[str]:
    return [f"{name}.gradient" for name in names]


def _compressed(
    kind: Kind, tensors: Tensors, names: Sequence[str], reduction: Reduction, compression: type[Compressor]
) -> list[torch.Tensor]:
    """Compress, reduce, decompress. The graph, if any, goes through the casts."""
    with refusing(kind, names, reduction.process_set):
        check_compressor(compression)
        pairs = [compression.compress(tensor) for tensor in tensors]
    reduce = reduce_tensors if kind is Kind.ALLREDUCE else scatter_tensors
    reduced = reduce([tensor for tensor, _ in pairs], names, reduction)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def _wait_all(group: GroupHandle) -> Results:
    return _as_results(group.wait())


def _wait_one(handle: Any) -> torch.Tensor:
    output: torch.Tensor = handle.wait()
    return output


def _as_results(outputs: Any) -> Results:
    results: Results = outputs
    return results
