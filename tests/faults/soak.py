"""Kills ranks again and again, at random moments, and counts what hangs, is left over, or is told wrongly. Not a test.

    HVDLITE_TEST_MPICH_PYTHON=.venv-mpich/bin/python .venv/bin/python tests/faults/soak.py --repetitions 50

Each time one or two of four ranks are killed while all reduce small or large tensors, under both MPIs in turn. It ends
with exit code 1 unless each time the job ended with one message that names a killed rank, and with nothing left.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from test_faults import LARGE, SMALL, broken, ours_in_shm, started, wait_until_working

RANKS = 4


def strike(mpi: SimpleNamespace, chance: random.Random) -> tuple[float, str]:
    """Run a job, kill some of its ranks, and return how long it took to be gone, and what was wrong ("": nothing)."""
    elements, victims = chance.choice((SMALL, LARGE)), chance.sample(range(RANKS), chance.choice((1, 2)))
    before = ours_in_shm()
    with started(mpi, *broken(mpi, "none", elements), size=RANKS) as job:
        wait_until_working(job)
        ranks = job.ranks()
        time.sleep(chance.random())
        at = time.monotonic()
        for rank in victims:
            os.kill(ranks[rank], signal.SIGKILL)
        try:
            code, err = job.end()
        except subprocess.TimeoutExpired:
            return time.monotonic() - at, f"hung, {victims} killed"
        left = job.gone()
        seconds = time.monotonic() - at
    named = [
        int(rank) for rank in re.findall(rf"^hvdrun: rank (\d) of {RANKS} on \S+ was killed by signal 9", err, re.M)
    ]
    problems = [
        f"exit code {code}" if code != 128 + signal.SIGKILL else "",
        f"ranks named: {named}" if len(named) != 1 or named[0] not in victims else "",
        f"left: {left}" if left else "",
        f"left in /dev/shm: {ours_in_shm() - before}" if ours_in_shm() - before else "",
    ]
    wrong = "; ".join(filter(None, problems))
    return seconds, f"{victims} killed: {wrong}\n{err}" if wrong else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    mpis = [SimpleNamespace(name="Open MPI", python=Path(sys.executable))]
    if other := os.environ.get("HVDLITE_TEST_MPICH_PYTHON"):
        mpis.append(SimpleNamespace(name="MPICH", python=Path(other).absolute()))
    chance, seconds, n_wrong = random.Random(options.seed), {mpi.name: [] for mpi in mpis}, 0
    for number in range(options.repetitions):
        mpi = mpis[number % len(mpis)]
        took, wrong = strike(mpi, chance)
        seconds[mpi.name].append(took)
        n_wrong += bool(wrong)
        if wrong:
            print(f"{number}, {mpi.name}, {took:.2f} s: {wrong}", flush=True)
    for name, all_of in seconds.items():
        print(f"{name}: {len(all_of)} times, gone after {statistics.median(all_of):.2f} s, at most {max(all_of):.2f} s")
    print(f"{options.repetitions} repetitions, {n_wrong} of them wrong")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
