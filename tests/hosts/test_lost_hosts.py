"""A host, or what runs there, is lost in the middle of a job: it ends, soon, with one message, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytestmark = pytest.mark.mpi
HUNG = 40.0  # seconds; docs/faults.md has what was measured
OUT_OF_REACH = 2  # seconds

# Silent, but for two lines: one when all ranks work, the other after twice the time that a host may be out of reach.
WORK = """
import sys, time
import numpy as np
import hvdlite as hvd
hvd.init()
gradients = np.ones(1_000_000, np.float32)
def work(seconds):
    end = time.monotonic() + seconds
    while hvd.allreduce(np.float32(time.monotonic() < end), name="goes on") == 1:
        hvd.allreduce(gradients, name="gradients")
    if hvd.rank() == 0:
        sys.stdout.write("working\\n")
        sys.stdout.flush()
work(0.1)
work(float(sys.argv[1]))
work(1000)
"""


def kill(cluster: Any, fits: Callable[[str], bool]) -> None:
    """Kill what runs on h2 and whose command fits, but for the sshd that waits for others."""
    found = [pid for pid, said in cluster.processes("h2").items() if fits(said) and "[listener]" not in said]
    assert found
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it has ended with another one
            os.kill(pid, 9)


def kill_its_ranks(cluster):
    kill(cluster, lambda said: said.startswith("python -c"))


def kill_its_daemon(cluster):
    kill(cluster, lambda said: "/prted " in said or "/hydra_pmi_proxy " in said)


def crash_it(cluster):
    kill(cluster, lambda said: True)


def cut_its_network(cluster):
    cluster.on("h2", "ip", "link", "set", "eth0", "down")


@dataclass(frozen=True)
class Loss:
    """How h2 is lost, what is said of it, by MPI, and for how many seconds the ranks have worked before."""

    harm: Callable[[Any], None]
    openmpi: str
    mpich: str
    seconds: float = 0


KILLED = r"rank [23] of 4 on h2 was killed by signal 9 \(SIGKILL\)"
NO_DAEMON = "mpirun lost its connection to h2, with ranks 2, 3 of 4: its daemon there was killed, or the host is down"
NO_WORD = "ranks 0, 1, 2, 3 of 4 on h1, h2 never reported an end: killed, or out of reach"
SILENCE = "nothing was heard from h2 with ranks 2, 3 of 4 for 2 s: it is down, or the network to it is cut"
LOSSES = [
    Loss(kill_its_ranks, KILLED, KILLED),
    Loss(kill_its_daemon, NO_DAEMON, NO_WORD),  # Hydra does not say whose daemon is gone
    Loss(crash_it, NO_DAEMON, f"{NO_DAEMON}|{NO_WORD}"),  # but its ssh does, if it has the time
    Loss(cut_its_network, SILENCE, SILENCE, 2.0 * OUT_OF_REACH),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda one: one.harm.__name__)
def test_a_lost_host_ends_the_job_with_one_message(cluster, mpi, loss):
    options = ["-H", "h1:2,h2:2", "--host-timeout", str(OUT_OF_REACH)]
    command = cluster.command(mpi, *options, "python", "-c", WORK, str(loss.seconds))
    with subprocess.Popen(
        command, env=cluster.environ(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as job:  # fmt: skip
        try:
            lines = [job.stdout.readline(), job.stdout.readline()]
            assert lines == 2 * ["[0] working\n"], (lines, job.communicate(timeout=HUNG))
            loss.harm(cluster)
            _, err = job.communicate(timeout=HUNG)
        finally:
            job.kill()
    assert job.returncode == 137 if loss.harm is kill_its_ranks else job.returncode != 0, err
    said = [line for line in err.splitlines() if line.startswith("hvdrun: ") and "running as root" not in line]
    assert len(said) == 1 and re.match(f"hvdrun: ({getattr(loss, mpi.name)})", said[0]), err
    if loss.harm is cut_its_network:
        assert set(cluster.left()) <= {"h2"}, cluster.left()
    else:
        assert cluster.gone(HUNG) == {}
