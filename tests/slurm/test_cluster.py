"""The cluster itself: what the other tests rely on, and that nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def test_nodes_are_hosts_of_their_own(slurm):
    done = slurm.run("srun", "-N2", "sh", "-c", "hostname; touch /dev/shm/$(hostname); ls /dev/shm; rm /dev/shm/n*")
    assert sorted(done.stdout.split()) == ["n1", "n1", "n2", "n2"], done.stderr
    assert not set(os.listdir("/dev/shm")) & {"n1", "n2"}


def test_nothing_stays(cluster_module):
    with cluster_module.Cluster(2) as cluster:
        place, pids = cluster._place, [daemon.pid for daemon in cluster._daemons.values()]
        job = cluster.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 1000").stdout.strip()
        cluster.wait_for(job, ["RUNNING"])
    assert not place.exists()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_it_ends_with_who_started_it(cluster_module, tmp_path):
    code = (
        f"import sys, time; sys.path.insert(0, {os.path.dirname(cluster_module.__file__)!r}); import cluster\n"
        "with cluster.Cluster(2) as made:\n"
        "    print(made._place, *[d.pid for d in made._daemons.values()], flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        place, *pids = maker.stdout.readline().split()
        maker.kill()
    deadline = time.monotonic() + 10
    while any(cluster_module._name(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, "daemons outlive their starter"
        time.sleep(0.01)
    subprocess.run(["rm", "-r", place], check=True)


def test_what_is_missing_is_named(cluster_module, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(cluster_module, "_PMIX", "/nowhere/libpmix.so")
    assert "srun, sbatch, " in cluster_module.missing()
    assert "libpmix.so not found (on Debian: apt install slurm-wlm munge libpmix-dev)" in cluster_module.missing()


def test_ci_installs_it(cluster_module, root=Path(__file__).parents[2]):
    assert " ".join(cluster_module.PACKAGES) in (root / ".ci/run").read_text()
