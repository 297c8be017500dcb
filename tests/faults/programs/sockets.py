"""Prints the listening TCP sockets of this rank, as inodes found in /proc, counted. Argument: `bare` or `hvdlite`."""

from __future__ import annotations

import os
import sys

import numpy as np

LISTEN = "0A"


def listening() -> int:
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the one that listed them
            continue
    count = 0
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not os.path.exists(table):
            continue
        with open(table) as file:
            rows = [line.split() for line in file][1:]
        count += sum(row[3] == LISTEN and f"socket:[{row[9]}]" in mine for row in rows)
    return count


if sys.argv[1] == "hvdlite":
    import hvdlite as hvd

    hvd.init()
    for step in range(20):
        hvd.allreduce(np.ones(10**6 if step % 2 else 10), name=f"w{step % 2}")
    hvd.barrier()
    if "ours" in sys.argv:
        import socket

        extra = socket.create_server(("127.0.0.1", 0))
    print(f"listening {listening()}", flush=True)
else:
    # What hvdlite does first of all: choose the parts of Open MPI. Then MPI alone, and traffic on it.
    os.environ.update(OMPI_MCA_btl="^ofi,uct", OMPI_MCA_osc="^ucx")
    from mpi4py import MPI

    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, np.ones(10**6))
    MPI.COMM_WORLD.Barrier()
    print(f"listening {listening()}", flush=True)
