"""`hvdlite.run()` over several hosts: function and results lie where all of them see it."""

from __future__ import annotations

SCRIPT = """
import socket, sys
import numpy as np
import hvdlite as hvd

def where():
    hvd.init()
    return hvd.rank(), socket.gethostname(), float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])

print(hvd.run(where, hosts="h1:1,h2:2", mpi_args=sys.argv[1]))
"""


def test_ranks_of_several_hosts_give_their_results(hosts, openmpi, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the function lies
    (tmp_path / "script.py").write_text(SCRIPT)
    mpirun = hosts.mpirun(openmpi.python, [1, 2])
    agent = mpirun[mpirun.index("plm_ssh_agent") + 1]
    command = [*hosts.enter("h1"), openmpi.python, "script.py", f"--prtemca plm_ssh_agent {agent}"]
    ended = hosts.run(command, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout == "[(0, 'h1', 3.0), (1, 'h2', 3.0), (2, 'h2', 3.0)]\n"
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
