"""The source files as the tests of this folder see them: import names, trees, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

# Folder -> import name, as in pyproject.toml.
FOLDERS = {
    "hvdlite": "hvdlite",
    "launch": "hvdlite.launch",
    "adapters/keras3": "hvdlite.keras",
    "adapters/pytorch": "hvdlite.torch",
    "adapters/tf": "hvdlite.tensorflow",
    "adapters/tf_keras3": "hvdlite.tensorflow.keras",
}


@dataclass(frozen=True)
class Source:
    """A source file under its import name."""

    path: Path
    name: str  # relative to the repository
    module: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), self.name)

    def at(self, node: ast.AST) -> str:
        """Return `hvdlite/config.py:12`, for messages."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}"

    def imports(self) -> Iterator[tuple[ast.stmt, str]]:
        """Yield every import, wherever it stands, as (node, dotted name).

        `from a import b` yields `a.b`; whether b is a module is for the reader to find out.
        """
        package = self.module.split(".")
        if self.path.name != "__init__.py":
            package.pop()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                origin = ".".join([*base, *([node.module] if node.module else [])])
                yield from ((node, f"{origin}.{alias.name}") for alias in node.names)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def folders(root: Path) -> dict[str, str]:
    """Folders that are installed, with their import names."""
    assert all((root / folder).is_dir() for folder in FOLDERS)
    return FOLDERS


@pytest.fixture(scope="session")
def sources(root: Path, folders: dict[str, str]) -> list[Source]:
    """Every source file that is installed."""
    found = []
    for folder, name in folders.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = [part for part in path.relative_to(root / folder).with_suffix("").parts if part != "__init__"]
            found.append(Source(path, str(path.relative_to(root)), ".".join([name, *parts])))
    return found
