"""From the JSON of the benchmarks to the tables in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]


def put(page: str, name: str, body: str) -> str:
    """Return `page` with `body` between the markers of `name`.

    Raises:
        ValueError: the page has no such markers.
    """
    begin, end = f"<!-- {name}: begin", f"<!-- {name}: end -->"
    head, found, rest = page.partition(begin)
    comment, closed, rest = rest.partition("-->\n")
    _, ended, tail = rest.partition(end)
    if not (found and closed and ended):
        raise ValueError(f"the page has no lines {begin!r} … {end!r}")
    return f"{head}{begin}{comment}-->\n{body.strip()}\n{end}{tail}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine(found: Found, day: str) -> str:
    """Return a sentence on what the figures depend on."""
    facts = found["machine"]
    parts = [f"{facts['ranks']} ranks on {facts['cores']} cores ({facts['processor']})", f"Python {facts['python']}"]
    parts += [f"torch {facts['torch']}"] if "torch" in facts else []
    return ", ".join([*parts, str(facts.get("mpi", "no MPI")), day]) + "."


def allreduce(found: Found) -> str:
    """Return a row for each case: microseconds, and in brackets how many times as fast as MPI and gloo."""
    head = ["Case", "hvdlite, µs", "× MPI", "× gloo", "in shared memory, µs", "× MPI", "× gloo", "MPI, µs", "gloo, µs"]
    rows = []
    for one in found["results"]:
        cells = [one["case"]]
        for mine in ("hvdlite", "shared"):
            ratios = one["times_as_fast_as"][mine]
            cells += [_us(one["median_seconds"][mine]), *(_ratio(ratios.get(peer)) for peer in ("mpi", "gloo"))]
        rows.append([*cells, *(_us(one["median_seconds"].get(peer)) for peer in ("mpi", "gloo"))])
    return markdown(head, rows)


def train(jobs: Mapping[str, Found]) -> str:
    """Return a row for each network and job: steps per second, and in brackets the scaling efficiency."""
    head = ["Network", "ranks", "hvdlite", "with bucket views", "DDP", "no communication"]
    rows = []
    for name, found in jobs.items():
        for one in found["results"]:
            cells = [f"{one['network'][:4].rstrip('0123456789')}, {one['parameters'] / 1e6:.1f} million", name]
            for contender in ("hvdlite", "hvdlite views", "ddp", "none"):
                row = one["contenders"][contender]
                brackets = "" if contender == "none" else f" ({row['efficiency']:.2f})"
                cells.append(f"{row['steps_per_second']:.1f}{brackets}")
            rows.append(cells)
    return markdown(head, rows)


def more_ranks(jobs: Mapping[str, Found]) -> str:
    """Return microseconds by size, hvdlite's and MPI's, for each number of ranks."""
    head = ["Bytes", *(f"{ranks} ranks: hvdlite, µs (× MPI)" for ranks in jobs)]
    sizes = [row["bytes"] for row in next(iter(jobs.values()))["results"]]
    rows = []
    for i, nbytes in enumerate(sizes):
        cells = [f"{nbytes / 1024:.0f} KiB"]
        for found in jobs.values():
            contenders = found["results"][i]["contenders"]
            mine, theirs = contenders["hvdlite"]["median"], contenders["mpi"]["median"]
            cells.append(f"{_us(mine)} ({_ratio(theirs / mine)})")
        rows.append(cells)
    return markdown(head, rows)


def roofline(found: Found) -> str:
    """Return the floor, the allreduce and its share of it, in place and private, for each size."""
    head = ["Size", "copy, GB/s", "sum, GB/s"]
    head += [
        f"{way}: {what}" for way in ("in place", "private") for what in ("bytes alone, µs", "allreduce, µs", "share")
    ]
    rows = []
    for one in found["results"]:
        nbytes, seconds = one["bytes"], one["median_seconds"]
        cells = [f"{nbytes / 2**20:g} MiB", f"{2e-9 * nbytes / seconds['copy']:.0f}"]
        cells.append(f"{3e-9 * nbytes / seconds['sum']:.0f}")
        for way in ("in place", "private"):
            floor = seconds.get(f"{way}, bytes alone")
            share = "" if floor is None else f"{floor / seconds[way]:.0%}"
            cells += [_us(floor), _us(seconds[way]), share]
        rows.append(cells)
    return markdown(head, rows)


def breakdown(found: Found) -> str:
    """Return the parts of a small allreduce."""
    median = found["median"]
    rows = [[name, f"{1e6 * seconds:.1f}", f"{seconds / median:.0%}"] for name, seconds in found["part"]]
    return markdown([f"{found['bytes']} bytes: part", f"µs of {1e6 * median:.0f}", "share"], rows)


def submit(found: Found) -> str:
    """Return what a gradient costs the thread that trains."""
    rows = [[what, f"{1e6 * seconds:.1f}"] for what, seconds in found["seconds"].items()]
    return markdown([f"For each of {found['gradients']} gradients", "µs"], rows)


def scale(jobs: Mapping[str, Found]) -> str:
    """Return efficiency by ranks, for each job and speed of the links."""
    head, by_ranks = ["Ranks"], dict[int, list[str]]()
    for name, found in jobs.items():
        for rate in dict.fromkeys(row["bandwidth"] for row in found["results"]):
            head.append(f"{rate * 8 / 1e9:g} Gbit/s, {name}")
            for row in found["results"]:
                if row["bandwidth"] == rate:
                    by_ranks.setdefault(row["ranks"], []).append(f"{row['efficiency']:.0%}")
    spread = next(iter(jobs.values()))["step"]["spread"]
    rows = [[str(ranks), *cells] for ranks, cells in by_ranks.items()]
    return f"{markdown(head, rows)}\n\nComputing varied by {spread:.1%} while the step was recorded."


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.0f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"
