"""Hosts made of namespaces, for what happens between hosts. Machinery and limits: benchmarks/hosts.py."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HOSTS = Path(__file__).parents[2] / "benchmarks" / "hosts.py"


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """The module that makes hosts. Where it cannot, tests are skipped, but in CI they fail."""
    spec = importlib.util.spec_from_file_location("hosts", HOSTS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if problem := module.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no hosts here: {problem}")
    return module


@pytest.fixture
def hosts(lab: ModuleType) -> Iterator[Any]:
    """Four hosts, taken down after the test."""
    with lab.Hosts(4) as made:
        yield made
