"""Tests of Keras on all ranks: run by tests/keras3/test_under_mpirun.py, or by hand:

KERAS_BACKEND=jax mpirun -n 2 python -m pytest -p hvdlite.testing.lockstep tests/keras3/in_step
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if config.pluginmanager.has_plugin("hvdlite-lockstep") else True


def pytest_configure(config: pytest.Config) -> None:
    # Keras 3.15 with NumPy 2, in convert_to_numpy().
    config.addinivalue_line("filterwarnings", "ignore:__array__ implementation doesn't accept:DeprecationWarning")


@pytest.fixture(scope="session")
def hvd():
    """`hvdlite.keras`, initialised."""
    import hvdlite.keras

    hvdlite.keras.init()
    yield hvdlite.keras
    hvdlite.keras.shutdown()


@pytest.fixture
def backend(hvd):
    import keras

    return keras.config.backend()


@pytest.fixture(autouse=True)
def fresh(hvd):
    """Names and seeds as in a new program."""
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
