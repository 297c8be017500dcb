"""Compressors that look at one tensor at a time: what travels is reduced as it is, and restored afterwards."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What `compression=` may be: this class, or one of your own, with these two static methods.

    Attributes:
        elementwise: what becomes of an element depends on it alone, so that several tensors may be compressed as one.
    """

    elementwise = False

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels and is reduced, and what `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in its old form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    elementwise = True

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in another dtype; all others as they are."""

    elementwise = True
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Sends float16: 11 significant bits, but nothing above 65504."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Sends bfloat16: float32's range, but 8 significant bits."""

    dtype = torch.bfloat16
