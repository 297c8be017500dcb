"""hvdlite.tensorflow on real ranks: the tests in in_step/, and programs."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTEST = ["-m", "pytest", "-p", "hvdlite.testing.lockstep", "-p", "no:cacheprovider", "--color=no", "-q", "-x"]
ENV = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_adapter_is_right_on_ranks(openmpi, size):
    openmpi.run(size, *PYTEST, HERE / "in_step", env=ENV, timeout=280).check()


def test_one_inter_op_thread_is_enough(openmpi):
    tests = [HERE / "in_step" / name for name in ("test_operations.py", "test_tape.py")]
    env = {**ENV, "TF_NUM_INTEROP_THREADS": "1"}
    openmpi.run(2, *PYTEST, *tests, "-k", "(function or loop or overlap) and not threads", env=env, timeout=280).check()
