"""Horovod's module of this name, for programs that import from it or look into it.

It has every name of `hvdlite.tensorflow`, and those that Horovod has nowhere else.
"""

from __future__ import annotations

import importlib
from typing import Any

from hvdlite.lowlevel import HorovodBasics, resolve_op

_basics = HorovodBasics()


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return the one operator that `op` and `average` mean together."""
    return resolve_op(op, average)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(__package__), name)
