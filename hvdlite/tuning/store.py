"""What tuning found, in a file for the next job: JSON, with what it is valid for.

Host names are not in it, since a batch system gives other hosts to every job; how many ranks there are, how
they are spread and what machine it is are.
"""

from __future__ import annotations

import json
import os
import platform
from typing import Any

from hvdlite.messages import Knobs
from hvdlite.observe.log import get_logger
from hvdlite.topology import Topology

_FORMAT = 1


def fingerprint(topology: Topology) -> dict[str, Any]:
    """Return what sizes depend on, as JSON has it."""
    per_host: dict[str, int] = {}
    for host in topology.hosts:
        per_host[host] = per_host.get(host, 0) + 1
    return {
        "ranks": topology.size,
        "ranks_per_host": sorted(per_host.values()),
        "cores": os.cpu_count() or 1,
        "machine": platform.machine(),
    }


def load(path: str, valid_for: dict[str, Any]) -> Knobs | None:
    """Return what is in `path`; None if there is no such file, or, with a warning, if it is of no use here."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        knobs = Knobs(**found["knobs"])
        there = found["valid_for"]
        _check(found.get("format"), knobs)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        get_logger().warning("HVDLITE_AUTOTUNE_FILE=%s: %s: %s; it is ignored.", path, type(error).__name__, error)
        return None
    differing = [f"{key}: {there.get(key)!r} there, {value!r} here" for key, value in valid_for.items()
                 if there.get(key) != value]  # fmt: skip
    if differing:
        get_logger().warning(
            "HVDLITE_AUTOTUNE_FILE=%s was made elsewhere (%s), and is ignored. HVDLITE_AUTOTUNE=1 makes it anew.",
            path, "; ".join(differing),
        )  # fmt: skip
        return None
    return knobs


def save(path: str, valid_for: dict[str, Any], knobs: Knobs, gain: float, step_bytes: int) -> None:
    """Write the file in one go. A disc that fails is a warning."""
    found = {
        "format": _FORMAT,
        "valid_for": valid_for,
        "knobs": knobs._asdict(),
        "gain": round(gain, 4),
        "step_bytes": step_bytes,
    }
    draft = f"{path}.{os.getpid()}"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(json.dumps(found, indent=2) + "\n")
        os.replace(draft, path)
    except OSError as error:
        get_logger().warning("HVDLITE_AUTOTUNE_FILE=%s: %s; what was found is not saved.", path, error)


def _check(found_format: object, knobs: Knobs) -> None:
    if found_format != _FORMAT:
        raise ValueError(f"format {found_format!r}, expected {_FORMAT}")
    for name, value in knobs._asdict().items():
        least = 1 if name in ("shared_memory_piece", "ring_chunk") else 0
        if type(value) not in (int, bool) or value < least or (name == "hierarchical") != (type(value) is bool):
            raise ValueError(f"{name}={value!r}")
