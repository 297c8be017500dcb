"""Threads that play ranks, with hvdlite.torch initialised on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, which takes seconds of a test's timeout

import hvdlite.torch as hvd
from hvdlite import runtime
from hvdlite.testing.ranks import run_ranks


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Ranks are threads already; OpenMP threads of each would only wait for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`ranks(size, body)` runs body(rank) on each rank and returns the results in rank order."""

    def ranks(size: int, body: Callable[[int], Any], timeout: float = 30.0) -> list[Any]:
        def play(comm: Any) -> Any:
            hvd.init()
            return body(comm.rank)

        return run_ranks(size, play, timeout=timeout, setup=runtime.as_rank)

    return ranks
