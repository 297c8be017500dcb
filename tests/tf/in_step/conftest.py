"""Tests of hvdlite.tensorflow that need all ranks: run by tests/tf/test_on_ranks.py, or by hand:

mpirun -n 3 python -m pytest -p hvdlite.testing.lockstep tests/tf/in_step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if config.pluginmanager.has_plugin("hvdlite-lockstep") else True


@pytest.fixture(scope="session")
def hvd() -> Iterator[Any]:
    """hvdlite.tensorflow, started."""
    import hvdlite.tensorflow as hvd

    hvd.init()
    yield hvd
    hvd.shutdown()


@pytest.fixture(params=["eager", "function", "unknown shapes"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`call(f, *args)`: eagerly, in a tf.function, and in one whose shapes are not known while it is traced."""
    import tensorflow as tf

    def plain(f: Callable[..., Any], *args: Any) -> Any:
        return f(*args)

    def traced(f: Callable[..., Any], *args: Any) -> Any:
        return tf.function(f)(*args)

    def shapeless(f: Callable[..., Any], *args: Any) -> Any:
        tensors = [tf.convert_to_tensor(arg) for arg in args]
        specs = [tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in tensors]
        return tf.function(f, input_signature=specs)(*tensors)

    return {"eager": plain, "function": traced, "unknown shapes": shapeless}[request.param]
