"""Hosts made of namespaces, for what happens between hosts. Machinery and limits: benchmarks/hosts.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def hosts(lab: ModuleType) -> Iterator[Any]:
    """Four hosts, taken down after the test."""
    with lab.Hosts(4) as made:
        yield made
