"""hvdrun over several hosts, by real ssh: training, who sits where, and that options for the way there arrive."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.mpi

# One line per rank: mpirun passes lines on whole, but not the parts of one.
WHERE = """
import os, socket, sys
import hvdlite as hvd
hvd.init()
words = socket.gethostname(), hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
sys.stdout.write(" ".join(map(str, words)) + f" {os.environ.get('A')} {os.environ.get('WANDB_API_KEY')};\\n")
"""


def seats(said: str) -> list[str]:
    """Return what ranks have said of themselves; MPICH may put one's line end behind another's line."""
    return sorted(filter(None, (one.strip() for one in said.split(";"))), key=lambda one: one.split()[1])


@pytest.mark.parametrize(
    ("cluster", "places", "library"),
    [(2, "h1:2,h2:2", "openmpi"), (4, "h1:1,h2:1,h3:1,h4:1", "openmpi"), (2, "h1:2,h2:2", "mpich")],
    indirect=["cluster"],
    ids=["openmpi-2x2", "openmpi-4x1", "mpich-2x2"],
)
def test_the_digits_are_learned_across_hosts(cluster, request, places, library):
    mpi = request.getfixturevalue(library)
    # The environment with MPICH has no torch: there this one's python loads that one's MPI.
    env = {"MPI4PY_LIBMPI": str(mpi.python.parents[1] / "lib" / "libmpi.so.12")} if library == "mpich" else {}
    example = [sys.executable, str(ROOT / "examples" / "pytorch_digits.py"), "--epochs", "1", "--min-accuracy", "50"]
    done = cluster.hvdrun(mpi, "-H", places, *example, env=env, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"accuracy \d+\.\d %, .* over 4 ranks", done.stdout)


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_ranks_know_their_places_and_get_what_is_named(cluster, mpi, tmp_path):
    # The launcher's own host has no rank, and one host has fewer than another.
    env = {"WANDB_API_KEY": "secret", "A": "not handed on"}
    ask = ("--no-label", "python", "-c", WHERE)
    (tmp_path / "hosts").write_text("h2 slots=2  # two ranks\nh3\n")
    done = cluster.hvdrun(mpi, "--hostfile", f"{tmp_path}/hosts", "-x", "A=1,2", *ask, env=env)
    assert done.returncode == 0, done.stderr
    assert seats(done.stdout) == ["h2 0 0 2 0 2 1,2 None", "h2 1 1 2 0 1 1,2 None", "h3 2 0 1 1 2 1,2 None"]


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_the_input_reaches_rank_0_on_another_host(cluster, mpi):
    text = "".join(f"{number}\n" for number in range(30_000))  # more than the launchers' pipes take
    count = "import sys; text = sys.stdin.read(); print(len(text), text[-6:].strip())"
    done = cluster.hvdrun(mpi, "-H", "h2,h3", "python", "-c", count, text=text)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[0] {len(text)} 29999", "[1] 0 "]


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_rank_that_does_not_come_is_named_with_its_host(cluster, mpi):
    code = "import socket, time; time.sleep(100 * (socket.gethostname() == 'h2')); import hvdlite; hvdlite.init()"
    done = cluster.hvdrun(mpi, "-H", "h1,h2", "--start-timeout", "2", "python", "-c", code)
    assert done.returncode == 1, done.stderr
    assert (
        "rank 1 of 2 has not come to hvd.init(), and rank 0 waits there for 2 s: rank 1 still runs on h2" in done.stderr
    )


def test_port_and_key_reach_the_ssh_of_mpirun(cluster, mpi, tmp_path):
    key = tmp_path / "key"
    shutil.copy(cluster.ssh / "user", key)
    (cluster.ssh / "user").unlink()
    cluster.stop_sshd("h2")
    cluster.sshd("h2", "-p", "2222")
    way = ["-p", "2222", "-i", str(key), "--start-timeout", "20", "--network-interfaces", "eth0", "--no-label"]
    done = cluster.hvdrun(mpi, "-H", "h[1-2]:1", *way, "python", "-c", WHERE)
    assert done.returncode == 0, done.stderr
    assert seats(done.stdout) == ["h1 0 0 1 0 2 None None", "h2 1 0 1 1 2 None None"]


REDUCE = """
import os, sys
import numpy as np
import hvdlite as hvd
hvd.init()
hvd.allreduce(np.ones(100_000))
sys.stdout.write(f"done {os.environ['NCCL_SOCKET_IFNAME']};\\n")
"""


def test_a_named_network_is_used_where_another_one_is_broken(cluster, mpi):
    # Both hosts have a second device in a common network, where all packets are lost. Open MPI would use it, too.
    cluster.second_network("h1", "h2")
    for host in ("h1", "h2"):
        cluster.drop(host, "iifname eth1")
    done = cluster.hvdrun(mpi, "-H", "h1:1,h2:1", "--network-interfaces", "eth0", "python", "-c", REDUCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done eth0;") == 2


def test_a_network_that_ranks_cannot_use_is_refused(cluster, openmpi):
    cluster.second_network("h1", "h2")
    cluster.drop("h1", "iifname eth1")
    done = cluster.hvdrun(openmpi, "-H", "h1:1,h2:1", "--network-interfaces", "eth1", "python", "-c", REDUCE)
    assert done.returncode == 2
    assert "do not get through: from h2 to 10.78.0.1 (timed out). Open the firewall" in done.stderr
