"""All measurements whose figures stand in the pages, one after the other, and the pages with the new figures.

    python benchmarks/report.py                     # about 7 minutes, with nothing else running
    python benchmarks/report.py --only train        # some jobs again; the other figures stay
    python benchmarks/report.py --quick             # does it run? Writes no page

Each job leaves its JSON in build/bench. Tables go between the markers in benchmarks/README.md and
docs/design/performance.md, pictures into docs/design.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "bench"
README, PERFORMANCE = ROOT / "benchmarks" / "README.md", ROOT / "docs" / "design" / "performance.md"
PICTURES = ROOT / "docs" / "design"
TIMEOUT = 900  # seconds for one job; on a quiet machine it takes a tenth of that
HVDRUN = [sys.executable, "-m", "hvdlite.launch", "--no-label"]
BENCH = [sys.executable, "-m", "hvdlite.bench"]
SIZES = ["--sizes", "1K,64K,1M,16M", "--vs", "mpi"]


def script(name: str) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / name)]


# Name, command, what is added for --quick. Each gets --json build/bench/NAME.json, but for the last three.
JOBS: list[tuple[str, list[str], list[str]]] = [
    ("allreduce", [*HVDRUN, "-np", "2", *script("allreduce.py")], ["--quick"]),
    ("allreduce-bound", [*HVDRUN, "-np", "2", "--bind-to", "core", *script("allreduce.py")], ["--quick"]),
    ("train-2", [*HVDRUN, "-np", "2", *script("train.py")], ["--repetitions", "1"]),
    ("train-bound", [*HVDRUN, "-np", "2", "--bind-to", "core", *script("train.py"), "--repetitions", "50"],
     ["--repetitions", "1"]),
    ("train-1", [*script("train.py"), "--repetitions", "50"], ["--repetitions", "1"]),
    ("ranks-3", [*BENCH, "allreduce", "-np", "3", *SIZES], ["--seconds", "0.01"]),
    ("ranks-4", [*BENCH, "allreduce", "-np", "4", *SIZES], ["--seconds", "0.01"]),
    ("roofline", [*HVDRUN, "-np", "2", *script("roofline.py")], ["--quick"]),
    ("breakdown", [*HVDRUN, "-np", "2", *script("breakdown.py")], ["--repetitions", "100"]),
    ("submit", [*HVDRUN, "-np", "2", *script("submit.py")], ["--repetitions", "20"]),
    ("picture", [*HVDRUN, "-np", "2", *script("picture.py"), str(RESULTS / "timeline.svg")], []),
    ("record", [*BENCH, "train", "--network", "mlp1024,2048,2048,1792,10",
                "--record", str(RESULTS / "step.json")], []),
    ("scale", [*BENCH, "scale", str(RESULTS / "step.json")], []),
    ("scale-even", [*BENCH, "scale", str(RESULTS / "step.json"), "--jitter", "0",
                    "--plot", str(RESULTS / "scale.png")], []),
]  # fmt: skip
WITHOUT_JSON = {"picture", "record"}


def main() -> None:
    arguments = parse_arguments()
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("report.py: the last job plots with matplotlib: pip install 'hvdlite[bench]'")
    RESULTS.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    for name, command, quickly in JOBS:
        if not any(name.startswith(only) for only in arguments.only):
            continue
        to = [] if name in WITHOUT_JSON else ["--json", str(RESULTS / f"{name}.json")]
        print(f"\n== {name}", flush=True)
        ended = subprocess.run([*command, *to, *(quickly if arguments.quick else [])], timeout=TIMEOUT, check=False)
        if ended.returncode:
            sys.exit(f"report.py: {name} ended with {ended.returncode}: {' '.join(command)}")
    print(f"\n{time.monotonic() - begun:.0f} s")
    if not arguments.quick:
        write(datetime.date.today().isoformat())


def write(day: str) -> None:
    """Put the figures of all jobs that have run into the pages."""
    for picture in ("timeline.svg", "scale.png"):
        if (RESULTS / picture).exists():
            shutil.copyfile(RESULTS / picture, PICTURES / picture)
    for page, name, needed, body in sections(day):
        if all((RESULTS / f"{job}.json").exists() for job in needed):
            page.write_text(tables.put(page.read_text(), name, body()))
            print(f"{page.relative_to(ROOT)}: {name}")


def sections(day: str) -> list[tuple[Path, str, list[str], Callable[[], str]]]:
    """Return pages, markers, the jobs whose figures they need, and what makes the text."""

    def read(job: str) -> tables.Found:
        found: tables.Found = json.loads((RESULTS / f"{job}.json").read_text())
        return found

    def with_machine(job: str, table: Callable[[tables.Found], str]) -> Callable[[], str]:
        return lambda: f"{tables.machine(read(job), day)}\n\n{table(read(job))}"

    trained = {"2": "train-2", "2, each bound to a core": "train-bound", "1": "train-1"}
    scaled = {"equal ranks": "scale-even", "ranks that vary": "scale"}
    ranks = {"3": "ranks-3", "4": "ranks-4"}
    return [
        (README, "allreduce", ["allreduce"], with_machine("allreduce", tables.allreduce)),
        (README, "allreduce bound", ["allreduce-bound"], lambda: tables.allreduce(read("allreduce-bound"))),
        (README, "train", [*trained.values()], lambda: tables.train({k: read(job) for k, job in trained.items()})),
        (
            README,
            "more ranks",
            [*ranks.values()],
            lambda: tables.more_ranks({k: read(job) for k, job in ranks.items()}),
        ),
        (PERFORMANCE, "roofline", ["roofline"], with_machine("roofline", tables.roofline)),
        (PERFORMANCE, "breakdown", ["breakdown"], lambda: tables.breakdown(read("breakdown"))),
        (PERFORMANCE, "submit", ["submit"], lambda: tables.submit(read("submit"))),
        (PERFORMANCE, "scale", [*scaled.values()], lambda: tables.scale({k: read(job) for k, job in scaled.items()})),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ", ".join(name for name, _, _ in JOBS)
    only = f"jobs whose names begin so; none: write the pages from what is there. Of {names}"
    parser.add_argument("--only", nargs="*", default=[""], metavar="JOB", help=only)
    parser.add_argument("--quick", action="store_true", help="few repetitions, and no page is written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
