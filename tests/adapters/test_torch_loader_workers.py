"""DataLoader workers that start after init(): they neither hang, nor end the job, nor talk to other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "loader_workers.py"


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_loader_workers_start_after_init(openmpi, method):
    ended = openmpi.run(2, PROGRAM, method, timeout=100).check()
    assert ended.out.strip() == "48 items, 4 workers, alike: True"
    assert ended.err == ""
