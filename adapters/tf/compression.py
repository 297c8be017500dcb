"""Compressors: what travels instead of a tensor. Casts of TensorFlow, so they work eagerly and in graphs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite import InvalidRequestError


class Compressor:
    """What `compression=` may be: this class, or one of your own, with these two static methods."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return what travels and is reduced, and what `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the reduced tensor in its old form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in another dtype; all others as they are."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """Sends float16: 11 significant bits, but nothing above 65504."""

    dtype = tf.float16


class BF16Compressor(_Cast):
    """Sends bfloat16: float32's range, but 8 significant bits."""

    dtype = tf.bfloat16


class Compression:
    """What comes with hvdlite."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def check_compressor(compression: object) -> None:
    """Raise `InvalidRequestError` unless this can compress a tensor."""
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise InvalidRequestError(f"compression={compression!r}: expected a Compressor, such as hvd.Compression.none.")
