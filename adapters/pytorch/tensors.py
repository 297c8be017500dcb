"""Between tensors and what the core takes: flat, contiguous arrays over the same memory.

What is contiguous is not copied. Everything else (channels_last, transposed, conjugated)
is copied there and back: whether other ranks have the same strides cannot be known here.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdlite import InvalidRequestError, UnsupportedDtypeError
from hvdlite.lowlevel import BFLOAT16, Item

Array = NDArray[Any]

_NAMES = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 complex128"
# uint16 and larger unsigned types came with torch 2.3.
_SUPPORTED = frozenset(getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name))


def as_array(tensor: torch.Tensor) -> Array:
    """Return the C-contiguous array over the memory of a contiguous tensor."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.dtype is torch.bfloat16:  # NumPy does not know it, torch does not know NumPy's stand-in
        return plain.view(torch.int16).numpy().view(BFLOAT16)
    array: Array = plain.numpy()
    return array


def as_source(tensor: torch.Tensor) -> Array:
    """Return an array of the values of `tensor`: over its memory if it is contiguous, else a copy.

    Raises:
        InvalidRequestError: it is not a strided tensor in host memory.
        UnsupportedDtypeError: its elements cannot be communicated.
    """
    _check(tensor)
    return as_array(_contiguous(tensor))


def to_new(tensor: torch.Tensor) -> Item:
    """Return the Item whose result is a new contiguous tensor of the same shape."""
    source = as_source(tensor)
    output = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return Item(source, as_array(output), value=output)


def to_same(tensor: torch.Tensor) -> Item:
    """Return the Item whose result is `tensor` itself, overwritten. Leaves that require grad are welcome."""
    _check(tensor)
    contiguous = _contiguous(tensor)
    array = as_array(contiguous)
    if contiguous is tensor:
        return Item(array, array, value=tensor)
    if any(stride == 0 and n > 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidRequestError(
            f"{describe(tensor)} with strides {tensor.stride()} cannot be changed in place: several of its elements "
            "are one place in memory (it was expanded). Pass a clone."
        )

    def put_back(_: Any) -> torch.Tensor:
        with torch.no_grad():
            tensor.data.copy_(contiguous)  # .data: autograd shall not object to a change of a leaf
        return tensor

    return Item(array, array, convert=put_back)


def to_gathered(tensor: torch.Tensor) -> Item:
    """Return the Item whose result is a new tensor, as long as all ranks need."""
    return Item(as_source(tensor), allocate=functools.partial(allocate, tensor.dtype))


def allocate(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Array, torch.Tensor]:
    """Return flat memory for a result of `shape`, and the tensor over it."""
    output = torch.empty(shape, dtype=dtype, device="cpu")
    return as_array(output).reshape(-1), output


def describe(tensor: torch.Tensor) -> str:
    """Return `float32[3, 4]`, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def as_splits(splits: Any) -> list[int] | None:
    """Return alltoall's `splits` as integers: from a tensor, an array or a sequence."""
    if splits is None:
        return None
    array = np.asarray(splits.detach().cpu() if isinstance(splits, torch.Tensor) else splits)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(f"alltoall: splits={splits!r}: expected one integer for each rank.")
    return [int(n) for n in array]


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` itself if its memory is its values in order, else a copy that no graph knows of."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _check(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(f"expected a torch.Tensor, got {type(tensor).__name__}: {tensor!r:.80}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        remedy = "make it dense" + (", or use sparse_allreduce_async" if layout == "sparse_coo" else "")
        raise InvalidRequestError(f"{layout} tensor {describe(tensor)} cannot be communicated here; {remedy}.")
    if tensor.device.type != "cpu":
        raise InvalidRequestError(
            f"{describe(tensor)} is on device {str(tensor.device)!r}; this version reduces in host memory: "
            "call .cpu() first."
        )
    if tensor.dtype not in _SUPPORTED:
        raise UnsupportedDtypeError(
            f"{describe(tensor)}: this dtype cannot be communicated; use one of {', '.join(sorted(_NAMES.split()))}."
        )
