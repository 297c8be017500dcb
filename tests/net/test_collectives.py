"""Collectives between hosts, over each MPI: one job for each layout of ranks, which checks everything by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "collectives.py"

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]


def run(hosts, mpi, ranks, *arguments, env=None):
    ended = hosts.run([*hosts.mpirun(mpi.python, ranks, env=env), PROGRAM, *arguments], timeout=60)
    assert ended.returncode == 0, f"exit status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    assert ended.stdout.count("done") == sum(ranks)
    return ended.stdout


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        ([1, 1, 1, 1], "tree ring"),
        ([2, 2], "tree hierarchical"),
        ([2, 1, 1], "tree hierarchical"),
        ([3, 1], "tree hierarchical"),
    ],
    ids=["1+1+1+1", "2+2", "2+1+1", "3+1"],
)
def test_everything_is_right_between_hosts(hosts, mpi, ranks, backend):
    assert f"by {backend}" in run(hosts, mpi, ranks)


def test_slow_and_long_links_change_nothing(hosts, openmpi):
    hosts.shape("1gbit")
    hosts.delay(0.001)
    run(hosts, openmpi, [2, 1, 1])


def test_without_hierarchy_all_ranks_are_in_one_ring(hosts, openmpi):
    assert "by tree ring" in run(hosts, openmpi, [2, 2], env={"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_host_sends_no_more_than_it_must(hosts, openmpi, dtype):
    # Its share of the sum and the others' shares come and go once: S bytes with two hosts; halves travel as float32 in
    # one direction. A ring of four ranks sends 1.5 S.
    size = 8 * 2**20
    out = run(hosts, openmpi, [2, 2], "sent", size, dtype)
    sent = [int(line.split()[1]) for line in out.splitlines() if line.startswith("sent")]
    least = size if dtype == "float32" else size * 3 // 2
    assert sent and all(least <= n < 1.15 * least for n in sent)
