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


def mount(hosts, size: str) -> None:
    """Give h1 a /dev/shm of this size."""
    small = ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", "/dev/shm"]
    subprocess.run([*hosts.enter("h1"), *small], check=True, timeout=20)


@pytest.mark.parametrize("size", ["64k", "2m"])  # no room for anything; for the flags, but not for the pieces
def test_a_small_memory_file_system_is_left_alone(hosts, openmpi, size):
    mount(hosts, size)
    ended = hosts.run([*hosts.mpirun(openmpi.python, [2]), "-c", PROGRAM], timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("right") == 2
    assert ended.stderr.count("no shared memory: '/dev/shm' is missing, not writable or too small") == 1
    left = subprocess.run([*hosts.enter("h1"), "ls", "-A", "/dev/shm"], capture_output=True, text=True, check=True)
    assert left.stdout == ""


def test_doctor_tells_of_little_shared_memory_and_that_jobs_run(hosts, openmpi, tmp_path):
    mount(hosts, "2m")
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")  # importing it is slow
    command = [
        *hosts.enter("h1"),
        "env",
        f"PYTHONPATH={tmp_path}",
        str(openmpi.python),
        "-m",
        "hvdlite.launch",
        "doctor",
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING  /dev/shm          2 MiB, 2 MiB free: large tensors go through MPI" in done.stdout
    assert "docker run --shm-size=2g" in done.stdout
    assert "ok       self-test         2 ranks, sums right" in done.stdout
