"""Prints api.md, from `__all__` of `hvdlite` and of its adapters.

`make docs` runs it and keeps the output as docs/reference/api.md.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import hvdlite
import hvdlite.keras
import hvdlite.tensorflow
import hvdlite.torch

HEAD = """\
# Names

Made from `__all__` of `hvdlite` and its adapters by `make docs`; do not edit. `help(hvd.allreduce)` says more.

## hvdlite

Takes NumPy arrays and whatever speaks DLPack, and returns NumPy arrays.
"""
ADAPTER = """
## {}

Names from above mean the same here. Operations take and return the framework's tensors. It adds or changes:
"""


def main() -> None:
    names = [name for name in hvdlite.__all__ if not name.startswith("__")]
    print(HEAD)
    print(table(hvdlite, names), end="")
    for adapter in (hvdlite.torch, hvdlite.tensorflow, hvdlite.keras):
        print(ADAPTER.format(adapter.__name__))
        print(table(adapter, [name for name in adapter.__all__ if differs(adapter, name)]), end="")


def differs(adapter: ModuleType, name: str) -> bool:
    """Return whether the adapter has something of its own under `name`."""
    return not name.startswith("__") and getattr(adapter, name) is not getattr(hvdlite, name, None)


def table(module: ModuleType, names: Iterable[str]) -> str:
    rows = ["| Name | |", "|---|---|"]
    for name in names:
        what = getattr(module, name)
        text = f"`{name}{signature(what)}`", summary(what)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in text) + " |")
    return "\n".join(rows) + "\n"


def signature(what: Any) -> str:
    """Return `(tensor, name=None)`; "" for constants, and for exceptions, which users do not make."""
    if not callable(what) or (isinstance(what, type) and issubclass(what, BaseException)):
        return ""
    if isinstance(what, type) and "__init__" not in vars(what):
        return ""
    parts: list[str] = []
    for one in inspect.signature(what).parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in parts and not any(part.startswith("*") for part in parts):
            parts.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        parts.append(stars + one.name + ("" if one.default is one.empty else f"={default(one.default)}"))
    return f"({', '.join(parts)})"


def default(value: Any) -> str:
    if value is hvdlite.global_process_set:
        return "global_process_set"
    if isinstance(value, enum.Enum):
        return value.name.capitalize()
    if value in (hvdlite.torch.Compression.none, hvdlite.tensorflow.Compression.none):
        return "Compression.none"
    return repr(value)


def summary(what: Any) -> str:
    """Return the first sentence-line of the docstring; constants have none of their own."""
    if isinstance(what, enum.Enum):
        return "A reduction, for `op=`."
    if what is hvdlite.global_process_set:
        return "The process set of all ranks."
    return (inspect.getdoc(what) or "").split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    main()
