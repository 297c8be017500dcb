"""A host with a tiny /dev/shm, as containers have: what does not fit goes through MPI, and that is said once."""

from __future__ import annotations

import subprocess

import pytest

PROGRAM = """
import numpy as np, hvdlite as hvd
hvd.init()
for n in (5, 5, 300001):
    total = hvd.allreduce(np.arange(float(n)) + hvd.rank(), op=hvd.Sum, name=f"x{n}")
    assert total.tolist() == (2 * np.arange(float(n)) + 1).tolist()
print("right", flush=True)
"""


@pytest.mark.parametrize("size", ["64k", "2m"])  # no room for anything; for the flags, but not for the pieces
def test_a_small_memory_file_system_is_left_alone(hosts, openmpi, size):
    small = ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", "/dev/shm"]
    subprocess.run([*hosts.enter("h1"), *small], check=True, timeout=20)
    ended = hosts.run([*hosts.mpirun(openmpi.python, [2]), "-c", PROGRAM], timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("right") == 2
    assert ended.stderr.count("no shared memory: '/dev/shm' is missing, not writable or too small") == 1
    left = subprocess.run([*hosts.enter("h1"), "ls", "-A", "/dev/shm"], capture_output=True, text=True, check=True)
    assert left.stdout == ""
