"""Starts of an elastic job by a real mpirun: each goes on from the commits of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

TRAIN = Path(__file__).parent / "programs" / "train.py"
STEPS = 9

pytestmark = pytest.mark.mpi


def undisturbed() -> int:
    value = 0
    for step in range(STEPS):
        value = value * 3 + step
    return value


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_after_a_killed_rank_the_next_start_goes_on(mpi, tmp_path, before, after):
    environ = {"HVDLITE_ELASTIC_DIR": str(tmp_path)}
    first = mpi.run(before, TRAIN, STEPS, "KILL", env=environ)
    assert first.code != 0
    assert "done" not in first.out
    second = mpi.run(after, TRAIN, STEPS, "KILL", env=environ).check()
    assert second.out == f"done {[(5, undisturbed(), after)] * after}\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"commit-{STEPS - 1}", f"commit-{STEPS}"]


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_after_a_signal_the_ranks_commit_and_leave(mpi, tmp_path, name):
    environ = {"HVDLITE_ELASTIC_DIR": str(tmp_path)}
    first = mpi.run(2, TRAIN, STEPS, name, env=environ).check()
    assert first.out == ""
    second = mpi.run(2, TRAIN, STEPS, name, env=environ).check()
    assert second.out == f"done {[(6, undisturbed(), 2)] * 2}\n"


KERAS = {
    "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTEROP_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(330)
@pytest.mark.parametrize(("backend", "before", "after"), [("tensorflow", 2, 3), ("torch", 3, 2), ("jax", 2, 1)])
def test_fit_goes_on_amid_an_epoch_with_other_ranks(openmpi, tmp_path, backend, before, after):
    """The program compares weights: equal bits on all ranks, and those of one process that nothing disturbs."""
    program = [TRAIN.parent / "train_keras.py"]
    if backend == "tensorflow":
        program = ["-m", "hvdlite.as_horovod", *program, "HOROVOD"]
    environ = {"HVDLITE_ELASTIC_DIR": str(tmp_path), "KERAS_BACKEND": backend, **KERAS}
    first = openmpi.run(before, *program, env=environ, timeout=150)
    assert first.code != 0
    assert "done" not in first.out
    assert "SIGKILL" in first.err or "signal 9" in first.err, first.err
    second = openmpi.run(after, *program, env=environ, timeout=150).check()
    assert second.out == f"done {[[15, (1, 2), after]] * after}\n"
