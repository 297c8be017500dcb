"""Horovod's module of this name, for programs that import from it or look into it.

It has every name of `hvdlite.torch`, and those that Horovod has nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from hvdlite import ProcessSet, is_homogeneous
from hvdlite.lowlevel import HorovodBasics, resolve_op

from .autograd import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = ["is_homogeneous"]

_basics = HorovodBasics()


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return the one operator that `op` and `average` mean together."""
    return resolve_op(op, average)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(__package__), name)


def _alltoall_with_splits(tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    return alltoall(tensor, [] if splits is None else splits, name, process_set)


def _function(operation: Callable[..., Any], parameters: str) -> type:
    """Return what stands for one of Horovod's autograd Functions: programs call `apply`, with positions only."""
    names = parameters.split()

    def apply(*given: Any) -> Any:
        if names[-1] == "tensors":  # all that are left, as autograd wants them
            n = len(names) - 1
            return operation(**dict(zip(names, [*given[:n], given[n:]], strict=True)))
        return operation(**dict(zip(names, given, strict=False)))

    return type(operation.__name__, (), {"apply": staticmethod(apply), "__doc__": operation.__doc__})


_FACTORS = "prescale_factor postscale_factor"
HorovodAllreduce = _function(allreduce, f"tensor average name op {_FACTORS} process_set")
HorovodGroupedAllreduce = _function(grouped_allreduce, f"average name op {_FACTORS} process_set tensors")
HorovodAllgather = _function(allgather, "tensor name process_set")
HorovodGroupedAllgather = _function(grouped_allgather, "name process_set tensors")
HorovodBroadcast = _function(broadcast, "tensor root_rank name process_set")
HorovodAlltoall = _function(_alltoall_with_splits, "tensor splits name process_set")
HorovodReducescatter = _function(reducescatter, f"tensor name op process_set {_FACTORS}")
HorovodGroupedReducescatter = _function(grouped_reducescatter, f"name op process_set {_FACTORS} tensors")
