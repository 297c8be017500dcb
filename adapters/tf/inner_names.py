"""Inner names of Horovod's that third-party code calls. Sum is the default of the operations here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite import Average, ProcessSet, global_process_set
from hvdlite.lowlevel import ReduceOp

from .collectives import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter
from .compression import Compression, Compressor
from .gradients import reduce_gradients, resolve
from .local import VariableSet


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = ReduceOp.SUM,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    return allreduce(
        tensor, op=op, name=name, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope, process_set=process_set,
    )  # fmt: skip


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = ReduceOp.SUM,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    return grouped_allreduce(
        tensors, op=op, name=name, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope, process_set=process_set,
    )  # fmt: skip


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = ReduceOp.SUM,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    return reducescatter(
        tensor, op=op, name=name, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope, process_set=process_set,
    )  # fmt: skip


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = ReduceOp.SUM,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    del name, ignore_name_scope  # the names of groups here are counted, or the graph's
    return grouped_reducescatter(
        tensors, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set
    )


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:
    """Return `fn(grads, vars=None, use_generic_names=False)`, which reduces a list of gradients."""
    how = resolve(
        op, gradient_predivide_factor, 0, groups, process_set, compression=compression,
        sparse_as_dense=sparse_as_dense, device_dense=device_dense, device_sparse=device_sparse,
    )  # fmt: skip

    def reduce(grads: Sequence[Any], vars: Sequence[Any] | None = None, use_generic_names: bool = False) -> list[Any]:
        variables = list(grads) if vars is None else list(vars)
        generic = use_generic_names or vars is None
        return reduce_gradients(list(grads), variables, how, name, VariableSet(), lambda g: g, generic)

    return reduce


def vars_to_refs(vars: Any) -> Any:
    """Return the references of variables, which can be keys; of a list a tuple."""
    return tuple(vars_to_refs(v) for v in vars) if isinstance(vars, list | tuple) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables of references."""
    return tuple(refs_to_vars(ref) for ref in refs) if isinstance(refs, list | tuple) else refs.deref()


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether `num_rank` is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
