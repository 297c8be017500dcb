"""The shorter ways of an allreduce: for a plain tensor, in a step that the ranks have learned.

Everything that is not plain goes the general way, which knows all cases and says what is wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hvdlite.lowlevel import Handle, allreduce_again, allreduce_at_once

from .tensors import Array, as_array

_NAMES = "uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
_DTYPES = {getattr(torch, name): name for name in _NAMES.split()}


class _Memory(NamedTuple):
    """Of a plain tensor, and of its result."""

    source: Array
    target: Array
    output: torch.Tensor


def reduce_at_once(
    tensor: Any, name: str, op: Any, prescale: Any, postscale: Any, process_set: Any, in_place: bool
) -> torch.Tensor | None:
    """Return the allreduced tensor, or None where this way does not lead there: then nothing has been done."""
    memory = _memory_of(tensor, in_place)
    if memory is None:
        return None
    source, target, output = memory
    done = allreduce_at_once(name, _DTYPES[tensor.dtype], source, target, op, prescale, postscale, process_set)
    return output if done else None


def reduce_again(
    tensor: Any, name: str, op: Any, prescale: Any, postscale: Any, process_set: Any, in_place: bool
) -> Handle | None:
    """Return the handle of an allreduce that has been submitted, or None: then nothing has been done."""
    memory = _memory_of(tensor, in_place)
    if memory is None:
        return None
    source, target, output = memory
    return allreduce_again(name, _DTYPES[tensor.dtype], source, target, op, prescale, postscale, process_set, output)


def _memory_of(tensor: Any, in_place: bool) -> _Memory | None:
    if not _is_plain(tensor, in_place):
        return None
    try:
        source = as_array(tensor)
        if in_place:
            return _Memory(source, source, tensor)
        output = torch.empty_like(tensor)
        return _Memory(source, as_array(output), output)
    except (RuntimeError, TypeError):  # a tensor of torch.func, for one
        return None


def _is_plain(tensor: Any, in_place: bool) -> bool:
    if type(tensor) is not torch.Tensor or tensor.dtype not in _DTYPES or not tensor.is_cpu:
        return False
    if tensor.requires_grad and (in_place or torch.is_grad_enabled()):
        return False
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_nested
