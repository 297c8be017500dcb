"""Stands in for Horovod: `horovod.torch` is the module `hvdlite.torch`, likewise its submodules.

`horovod.common` and `horovod.version` are here, since they exist for Horovod's sake only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

from .version import __version__ as __version__

_FRAMEWORKS = ("torch", "tensorflow", "keras")
_OWN = ("common", "version")


class _Alias(Loader):
    """Makes a name of Horovod another name of a module of hvdlite."""

    def __init__(self, real: str) -> None:
        self._real = real

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what is there in the end. Given to it earlier, by create_module(), the module of
        # hvdlite would get the spec of this one.
        sys.modules[module.__name__] = importlib.import_module(self._real)


class _Finder(MetaPathFinder):
    """Comes before the search of folders, which would find hvdlite's files and load them a second time."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        first = rest.split(".")[0]
        if package != __name__ or not rest:
            return None
        real = f"hvdlite.{rest}"
        if first in _OWN:
            spec = PathFinder.find_spec(name, path)
        elif first in _FRAMEWORKS and _exists(real):
            spec = importlib.util.spec_from_loader(name, _Alias(real))
        else:
            spec = None
        # Who only looks, with importlib.util.find_spec(), gets None.
        if spec is None and sys._getframe(2).f_code.co_name != "find_spec":
            _refuse(name)
        return spec


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor does the package that it would be in
        return False


def _refuse(name: str) -> NoReturn:
    # Without `name=`: then also `from horovod import x` shows this text.
    raise ModuleNotFoundError(
        f"{name} is not in this version of hvdlite, which stands in for Horovod in this program. "
        "See hvdlite's docs/migrating.md for what there is, and what takes the place of the rest."
    )


def _refuse_beside_horovod() -> None:
    """Two of them in one program would be two sets of ranks that wait for each other."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = PathFinder.find_spec(__name__, [entry for entry in sys.path if os.path.abspath(entry) != here])
    if found is not None and found.origin is not None:
        raise ImportError(
            f"Horovod itself is installed, in {found.origin}, so hvdlite does not stand in for it. Remove it "
            "('pip uninstall horovod'), or run the program without hvdlite's --as-horovod."
        )


def __getattr__(name: str) -> Any:
    if name == "run":
        raise AttributeError("horovod.run() is not here; use hvdlite.run(), or start programs with hvdrun.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_refuse_beside_horovod()
sys.meta_path.insert(0, _Finder())
