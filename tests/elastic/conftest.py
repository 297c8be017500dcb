"""Threads that play ranks of an elastic job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.testing.ranks import run_ranks


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`ranks(size, body)` runs body(rank) on each rank and returns the results in rank order."""

    def ranks(size: int, body: Callable[[int], Any], timeout: float = 30.0) -> list[Any]:
        def play(comm: Any) -> Any:
            hvd.init()
            return body(comm.rank)

        return run_ranks(size, play, timeout=timeout, setup=runtime.as_rank)

    return ranks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the ranks of a job that is started again find their commits."""
    monkeypatch.setenv("HVDLITE_ELASTIC_DIR", str(tmp_path / "commits"))
    return tmp_path / "commits"
