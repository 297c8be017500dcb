"""Smaller numbers on the wire, chosen by `compression=`."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import InvalidRequestError


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


class Compression:
    """The compressors that come with hvdlite."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def check_compressor(compression: object) -> None:
    """Raise `InvalidRequestError` if this is not what `compression=` may be."""
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise InvalidRequestError(f"compression={compression!r}: expected a Compressor, such as hvd.Compression.none.")
