"""Tensors in memory that all ranks of a host see."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hvdlite
from hvdlite import InvalidRequestError, ProcessSet, global_process_set
from hvdlite.lowlevel import Kind, name_for, refusing


def shared_zeros(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> torch.Tensor:
    """Return a new tensor of zeros which `allreduce_` reduces where it lies, without a copy. Collective.

    As `hvdlite.shared_zeros`, for tensors: views of it, and parameters and gradients that are set to it or to views
    of it, are reduced in place, too.

    Args:
        dtype: None is torch's default dtype.
    """
    name = name_for(Kind.SHARED_BUFFER, name, process_set)
    with refusing(Kind.SHARED_BUFFER, [name], process_set):
        try:
            wanted = torch.empty(shape, dtype=dtype, device="meta")
        except (TypeError, RuntimeError) as error:
            raise InvalidRequestError(f"shared_zeros({shape!r}, {dtype!r}): {error}") from error
    nbytes = wanted.numel() * wanted.element_size()
    return (
        torch.from_numpy(hvdlite.shared_zeros(nbytes, "uint8", process_set, name)).view(wanted.dtype).view(wanted.shape)
    )
