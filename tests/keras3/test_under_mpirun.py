"""The adapter for Keras on its three backends, over MPI. A job takes seconds to import a framework, so they are few."""

from __future__ import annotations

from pathlib import Path

import pytest

IN_STEP = Path(__file__).parent / "in_step"
PYTEST = ["-m", "pytest", "-p", "hvdlite.testing.lockstep", "-p", "no:cacheprovider", "--color=no", "-q"]
# A rank per core at most, and no log of TensorFlow's. XLA compiles for minutes what runs for milliseconds: not well.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTEROP_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(IN_STEP),
}  # fmt: skip

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(400)]


def run(openmpi, size, backend, *more, **environment):
    command = [*PYTEST, "--lockstep-deadline", "60", IN_STEP, *more]
    return openmpi.run(
        size, *command, env={**ENVIRONMENT, "KERAS_BACKEND": backend, **environment}, timeout=380
    ).check()


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_two_ranks(openmpi, backend):
    run(openmpi, 2, backend)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_three_ranks(openmpi, backend):
    run(openmpi, 3, backend, "-k", "fit_is_one or passes_are or overflow or averages or loops or numbers_of_steps")


def test_three_ranks_of_jax(openmpi):  # fewer: JAX compiles each step of each rank
    run(openmpi, 3, "jax", "-k", "fit_is_one and sgd or passes_are or local_gradient or numbers_of_steps")


def test_jax_in_double_precision(openmpi):
    run(openmpi, 2, "jax", "-k", "double_precision", JAX_ENABLE_X64="1")
