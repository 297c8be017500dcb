"""Runs an example as its first lines say, and returns what it printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def run_example(openmpi: Any) -> Callable[..., str]:
    """`run_example(name, size, *options)` returns the standard output of all ranks together."""

    def run_example(name: str, size: int, *options: Any) -> str:
        command = EXAMPLES / name, *options
        ended = openmpi.run(size, *command, timeout=100) if size > 1 else openmpi.run_alone(*command, timeout=100)
        assert "Warning" not in ended.check().err, ended.err
        return ended.out

    return run_example
