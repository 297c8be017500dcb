"""Fewer bytes on the wire, chosen by `compression=` (docs/compression.md says which, and when).

A `Compressor` turns one tensor into another that is reduced in its place. A `CommHook` does
the reducing itself, and holds back what it did not send until the next step: `int8`,
`topk` and `powersgd` are of this kind, for the gradients of a `DistributedOptimizer`.
"""

from __future__ import annotations

from typing import Any

from hvdlite import InvalidRequestError

from .casts import BF16Compressor, Compressor, FP16Compressor, NoneCompressor
from .hook import CommHook, Wire
from .int8 import Int8
from .powersgd import PowerSGD
from .topk import TopK

__all__ = [
    "BF16Compressor",
    "CommHook",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "Int8",
    "NoneCompressor",
    "PowerSGD",
    "TopK",
    "Wire",
    "check_compressor",
    "describe_compression",
    "resolve_compression",
]


class Compression:
    """What comes with hvdlite. The last three are for `DistributedOptimizer` only, with or without arguments."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8
    topk = TopK
    powersgd = PowerSGD


def resolve_compression(compression: Any) -> type[Compressor] | CommHook:
    """Return what `compression=` of `DistributedOptimizer` means: the class of a hook stands for its defaults."""
    if isinstance(compression, type) and issubclass(compression, CommHook):
        compression = compression()
    if isinstance(compression, CommHook):
        return compression
    check_compressor(compression)
    resolved: type[Compressor] = compression
    return resolved


def describe_compression(compression: Any) -> str:
    """Return what must be equal on all ranks, in words."""
    return (
        repr(compression) if isinstance(compression, CommHook) else getattr(compression, "__name__", str(compression))
    )


def check_compressor(compression: object) -> None:
    """Raise `InvalidRequestError` unless this compresses one tensor by itself."""
    if isinstance(compression, CommHook) or (isinstance(compression, type) and issubclass(compression, CommHook)):
        raise InvalidRequestError(
            f"compression={describe_compression(compression)}: it keeps what it did not send for the next step, and so "
            "works only as DistributedOptimizer(compression=). For one tensor take hvd.Compression.fp16 or bf16."
        )
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise InvalidRequestError(f"compression={compression!r}: expected a Compressor, such as hvd.Compression.none.")
