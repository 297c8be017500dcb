"""Does `bench scale` tell the truth? Predicted against measured step times on 2, 3 and 4 hosts made of namespaces.

    python benchmarks/validate_scale.py [--rate 1gbit] [--json results.json]

Needs root, iproute2 and util-linux. Two hosts are calibrated (`bench calibrate`); what that finds predicts the steps on
2, 3 and 4 hosts (`bench scale`), which are then run (`bench replay`). Computing is sleep, so that hosts that share the
machine's cores do not slow each other down, and the network is what is measured. The command fails when a prediction is
more than 20 % off.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hosts import Hosts, missing

from hvdlite.bench import cluster, replay
from hvdlite.bench import step as steps
from hvdlite.bench.step import Step
from hvdlite.bench.table import render
from hvdlite.bench.units import show_rate, show_time

ALLOWED = 0.2
TIMEOUT = 60.0  # seconds for one job
MIB = 2**20


def made_up_steps() -> list[Step]:
    """Return a step that hides most of its communication, one that hides little, and one of small gradients."""
    return [
        steps.even_step("8 buckets of 1 MiB in 300 ms", 0.3, [MIB] * 8),
        steps.even_step("8 buckets of 2 MiB in 60 ms", 0.06, [2 * MIB] * 8),
        steps.even_step("40 gradients of 8 KiB in 60 ms", 0.06, [8 * 1024] * 40),
    ]


def main() -> None:
    arguments = parse_arguments()
    if problem := missing():
        sys.exit(f"validate_scale.py: no hosts here: {problem}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the hosts are taken down
    results = []
    with Hosts(max(arguments.hosts)) as hosts, tempfile.TemporaryDirectory() as folder:
        hosts.shape(arguments.rate)
        machine = calibrate(hosts, Path(folder))
        print(
            f"calibrated on 2 hosts at {arguments.rate}: {show_rate(machine.bandwidth)}, latency "
            f"{show_time(machine.latency)}, {show_time(machine.per_batch)} per batch\n",
            flush=True,
        )
        for step in made_up_steps():
            for n in arguments.hosts:
                predicted = replay.predict(step, n, machine).outcome.seconds
                measured = rehearse(hosts, n, step, Path(folder))
                print(f"{step.name}, {n} hosts: {predicted / measured - 1:+.1%}", flush=True)
                results.append(
                    {"step": step.name, "hosts": n, "predicted": predicted, "measured": measured,
                     "error": predicted / measured - 1}
                )  # fmt: skip
    print("\n" + table(results))
    if arguments.json:
        found = {"rate": arguments.rate, "cluster": dataclasses.asdict(machine), "results": results}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if wrong := [one for one in results if abs(one["error"]) > ALLOWED]:
        sys.exit(f"{len(wrong)} of {len(results)} predictions are more than {ALLOWED:.0%} off")


def calibrate(hosts: Hosts, folder: Path) -> cluster.Cluster:
    """Return what `bench calibrate` finds between two hosts."""
    output = folder / "cluster.toml"
    bench(hosts, 2, "calibrate", "--output", output)
    return cluster.read(output)


def rehearse(hosts: Hosts, n: int, step: Step, folder: Path) -> float:
    """Return the median seconds of a step on `n` hosts."""
    file, output = folder / "step.json", folder / "replay.json"
    steps.write(step, file)
    bench(hosts, n, "replay", file, "--repetitions", 10, "--json", output)
    return float(json.loads(output.read_text())["results"]["median"])


def bench(hosts: Hosts, n: int, *command: object) -> None:
    """Run a subcommand of `hvdlite.bench` with a rank on each of `n` hosts."""
    # MPI sees one rank per host and spins; but here the hosts share cores, and one that spins starves the others.
    start = hosts.mpirun(sys.executable, [1] * n, env={"OMPI_MCA_mpi_yield_when_idle": "1"})
    ended = hosts.run([*start, "-m", "hvdlite.bench", *map(str, command)], timeout=TIMEOUT)
    if ended.returncode:
        sys.exit(f"bench {' '.join(map(str, command))} on {n} hosts failed:\n{ended.stdout}\n{ended.stderr}")


def table(results: Sequence[dict]) -> str:  # type: ignore[type-arg]
    """Return the results as text."""
    rows = [
        (one["step"], one["hosts"], show_time(one["predicted"]), show_time(one["measured"]), f"{one['error']:+.1%}")
        for one in results
    ]
    return render(["step", "hosts", "predicted", "measured", "off by"], rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it (default: 1gbit)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4], help="how many (default: 2 3 4)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
