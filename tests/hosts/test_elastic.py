"""A job that loses a host goes on without it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time

import pytest

pytestmark = pytest.mark.mpi

# Each step is committed. What is lost, and when, is up to the test: it waits for a step, and lets the job go on then.
TRAIN = """
import json, os, socket, sys, time
import numpy as np
import hvdlite as hvd
folder = sys.argv[1]
hvd.init()

@hvd.elastic.run
def train(state):
    state.places = [*state.places, hvd.allgather_object(socket.gethostname())]
    while state.step < 8:
        state.sum = state.sum * 3 + int(hvd.allreduce(np.array([state.step]), name="step")[0])
        state.step += 1
        state.commit()
        if hvd.rank() == 0:
            with open(f"{folder}/step.new", "w") as file:
                file.write(str(state.step))
            os.replace(f"{folder}/step.new", f"{folder}/step")
        while state.step == 4 and len(state.places) == 1 and not os.path.exists(f"{folder}/go"):
            time.sleep(0.02)
        time.sleep(0.05)

state = hvd.elastic.ObjectState(step=0, sum=0, places=[])
train(state)
if hvd.rank() == 0:
    print("end", json.dumps([state.step, state.sum, state.places]), flush=True)
"""


def expected(steps: int) -> int:
    value = 0
    for step in range(steps):
        value = value * 3 + step
    return value


def lose(cluster, host):
    """Let a host be gone, as when its power fails: nothing more comes from it, and all that ran there is dead."""
    cluster.on(host, "ip", "link", "set", "eth0", "down")
    for pid in cluster.processes(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cut_off(cluster, host):
    """Let nothing reach a host any more, nor come from it; what runs there runs on."""
    cluster.on(host, "ip", "link", "set", "eth0", "down")


def wait_for(done, job):
    deadline = time.monotonic() + 60
    while not done():
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()
        time.sleep(0.02)


def start(cluster, mpi, folder, *args):
    command = cluster.command(mpi, *args, "--elastic-dir", str(folder / "kept"), "--start-timeout", "6", "--no-label")
    return subprocess.Popen(
        [*command, "python", "-c", TRAIN, str(folder)], env=cluster.environ(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def outcome(job):
    out, err = job.communicate(timeout=90)
    assert job.returncode == 0, out + err
    (line,) = re.findall(r"^end (.*)$", out, re.MULTILINE)
    return json.loads(line), err


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_job_goes_on_without_a_host_that_is_gone(cluster, mpi, tmp_path):
    job = start(cluster, mpi, tmp_path, "-H", "h1:2,h2:1,h3:1", "--min-np", "2")
    step = tmp_path / "step"
    wait_for(lambda: step.exists() and step.read_text() == "4", job)
    lose(cluster, "h2")
    (tmp_path / "go").touch()
    (steps, total, places), err = outcome(job)
    assert (steps, total) == (8, expected(8))
    assert places == [["h1", "h1", "h2", "h3"], ["h1", "h1", "h3"]]
    assert re.search(r"hvdrun: start 2 on 3 ranks on h1:2,h3:1: .*; goes on from commit 4", err), err
    assert cluster.gone(10) == {}


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_job_goes_on_without_a_host_that_is_cut_off(cluster, mpi, tmp_path):
    job = start(cluster, mpi, tmp_path, "-H", "h1:2,h2:1", "--min-np", "2", "--host-timeout", "3")
    step = tmp_path / "step"
    wait_for(lambda: step.exists() and step.read_text() == "4", job)
    cut_off(cluster, "h2")
    (tmp_path / "go").touch()
    (steps, total, places), err = outcome(job)
    assert (steps, total) == (8, expected(8))
    assert places == [["h1", "h1", "h2"], ["h1", "h1"]]
    assert re.search(r"hvdrun: start 2 on 2 ranks on h1:2: nothing was heard from h2 with rank 2 of 3 .*", err), err
