"""Allreduce between hosts: how close to what the links allow? hvdlite, raw MPI and gloo in one job, in turn.

    python benchmarks/network.py [--rate 1gbit] [--delay 0.001] [--json results.json] [--quick]

Needs root, iproute2 and util-linux: it makes hosts from namespaces (hosts.py), limits what each may send, or delays
every frame, starts jobs on them, and takes everything down. All hosts share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# These hosts share cores, which no rank can know: where ranks of Open MPI spin, they would starve each other.
SHARED_CORES = {"OMPI_MCA_mpi_yield_when_idle": "1", "GLOO_SOCKET_IFNAME": "eth0"}
LARGE, SMALL = 64 * 2**20, 1024  # bytes
IN_A_ROW = 20  # small ones: each begins when the one before has ended, and so is in step with the others
WARM_UP = 12  # small ones, until the schedule is learned


def main() -> None:
    from hosts import Hosts, missing

    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the hosts are taken down
    if problem := missing():
        sys.exit(f"network.py: no hosts here: {problem}")
    repetitions = 1 if arguments.quick else 3
    rate = arguments.rate
    flat, dealt = {"HVDLITE_HIERARCHICAL": "0"}, {"PLACED": "dealt"}
    results = []
    with Hosts(4) as hosts:

        def job(title: str, ranks: Sequence[int], nbytes: int, env: dict[str, str] | None = None) -> dict[str, float]:
            names = "hvdlite" if env else arguments.contenders
            command = hosts.mpirun(sys.executable, ranks, env={**SHARED_CORES, **(env or {})})
            if (env or {}).get("PLACED") == "dealt":
                command[command.index("--bind-to") : command.index("--bind-to")] = ["--map-by", "node"]
            ended = hosts.run([*command, __file__, "--rank", nbytes, repetitions, names], timeout=90)
            if ended.returncode:
                sys.exit(f"{title}: exit status {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
            found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
            results.append({"case": title, "ranks": list(ranks), "bytes": nbytes, "median_seconds": found})
            return found

        hosts.shape(rate)
        for n in (4, 2):
            bound = LARGE * 2 * (n - 1) / n * 8 / bits_per_second(rate)
            title = f"64 MiB, {n} hosts, {rate}"
            show(title, job(title, [1] * n, LARGE), lambda s, bound=bound: f"{bound / s:.0%} of the bound")
        two_by_two = [
            ("hierarchical", None), ("flat ring", flat), ("hierarchical, ranks dealt out", dealt),
            ("flat ring, ranks dealt out", {**flat, **dealt}),
        ]  # fmt: skip
        bound = LARGE * 8 / bits_per_second(rate)  # of a host
        for name, env in two_by_two:
            title = f"64 MiB, 2 hosts x 2 ranks, {rate}, {name}"
            show(title, job(title, [2, 2], LARGE, env), lambda s: f"{bound / s:.0%} of the bound of a host")
        hosts.shape(None)
        hosts.delay(arguments.delay)
        for n, ranks in ((4, [1, 1, 1, 1]), (2, [1, 1]), (2, [2, 2])):
            title = f"1 KiB, {n} hosts, {sum(ranks)} ranks, {1e3 * arguments.delay:g} ms one way"
            show(title, job(title, ranks, SMALL), lambda s: f"{s / arguments.delay:.2f} one-way delays")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="of each host's link: a number and mbit or gbit")
    parser.add_argument("--delay", type=float, default=1e-3, help="one way, seconds")
    parser.add_argument("--contenders", default="hvdlite,mpi,gloo", help="of hvdlite,mpi,gloo")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one repetition: does it run at all?")
    return parser.parse_args()


def bits_per_second(rate: str) -> float:
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    sys.exit(f"--rate {rate}: expected a number and mbit or gbit")


def show(title: str, seconds: dict[str, float], judge: Callable[[float], str]) -> None:
    print(title)
    for name, value in seconds.items():
        print(f"    {name:<8} {1e3 * value:9.2f} ms   {judge(value)}", flush=True)


def run_as_rank(nbytes: int, repetitions: int, names: Sequence[str]) -> None:
    """Measure the contenders in turn; rank 0 prints the medians of the slowest rank as JSON."""
    import numpy as np

    import hvdlite as hvd

    hvd.init()
    from mpi4py import MPI  # late: the core prepares the environment of MPI

    comm = MPI.COMM_WORLD
    array = np.empty(nbytes // 4, np.float32)
    contenders: dict[str, Callable[[], Any]] = {
        "hvdlite": lambda: hvd.allreduce_(array, op=hvd.Sum, name="sum"),
        "mpi": lambda: comm.Allreduce(MPI.IN_PLACE, [array, MPI.FLOAT]),
    }
    if "gloo" in names:
        contenders["gloo"] = by_gloo(array)
    row = IN_A_ROW if nbytes <= SMALL else 1
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions + 1):
        for name in names:
            run = contenders[name]
            if row > 1:
                array.fill(0)
                for _ in range(WARM_UP):
                    run()
            array.fill(0 if row > 1 else comm.rank + 1)
            comm.Barrier()
            started = time.perf_counter()
            for _ in range(row):
                run()
            took = (time.perf_counter() - started) / row
            if row == 1 and not (array == comm.size * (comm.size + 1) / 2).all():
                raise SystemExit(f"{name}: wrong sum on rank {comm.rank}")
            slowest = comm.allreduce(took, MPI.MAX)
            if repetition:  # the first warms up
                seconds[name].append(slowest)
    if comm.rank == 0:
        print(json.dumps({name: statistics.median(values) for name, values in seconds.items()}), flush=True)
    if "gloo" in names:
        import torch.distributed as dist

        dist.destroy_process_group()
    hvd.shutdown()


def by_gloo(array: Any) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    from hvdlite.bench import peers

    peers.start_gloo(peers.ranks())
    tensor = torch.from_numpy(array)
    return lambda: dist.all_reduce(tensor)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_as_rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(","))
    else:
        main()
