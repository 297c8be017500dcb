"""Ending hvdrun ends every rank on every host, and whatever started them."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

pytestmark = pytest.mark.mpi
LIMIT = 10.0  # seconds; the promise to users

STAY = """
import signal, sys, time
from mpi4py import MPI
if "deaf" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
sys.stdout.write("up\\n")
sys.stdout.flush()
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGTERM, "willing"), (signal.SIGINT, "willing"), (signal.SIGTERM, "deaf"), (signal.SIGKILL, "deaf")],
)
def test_all_ranks_on_all_hosts_end_with_hvdrun(cluster, mpi, number, how):
    command = cluster.command(mpi, "-H", "h1:1,h2:1", "python", "-u", "-c", STAY, how)
    job = subprocess.Popen(
        command, env=cluster.environ(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with job:
        said = b""
        while said.count(b"up") < 2:
            piece = job.stdout.read1()
            assert piece, job.stderr.read()
            said += piece
        assert set(cluster.left()) == {"h1", "h2"}
        told = time.monotonic()
        job.send_signal(number)
        assert job.wait(LIMIT) != 0
        assert cluster.gone(LIMIT - (time.monotonic() - told)) == {}
