"""Options of other launchers that users bring along, and what to say instead. None of them is accepted."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

_RANKS = "say -np N"
_GONE = "nothing takes its place"

# docs/migrating.md has the same as a table.
INSTEAD = {
    "--np": _RANKS,
    "--nproc-per-node": _RANKS,
    "--nproc_per_node": _RANKS,
    "--fusion-threshold-mb": "set HVDLITE_FUSION_THRESHOLD, in bytes",
    "--cache-capacity": "set HVDLITE_CACHE_CAPACITY",
    "--timeline-filename": "set HVDLITE_TIMELINE",
    "--timeline-mark-cycles": "set HVDLITE_TIMELINE_MARK_CYCLES=1",
    "--no-stall-check": "set HVDLITE_STALL_WARNING=0",
    "--stall-check-warning-time-seconds": "set HVDLITE_STALL_WARNING",
    "--stall-check-shutdown-time-seconds": "set HVDLITE_STALL_SHUTDOWN",
    "--thread-affinity": "set HVDLITE_THREAD_AFFINITY",
    "--log-level": "set HVDLITE_LOG_LEVEL",
    "--log-without-timestamp": "set HVDLITE_LOG_HIDE_TIME=1",
    "--binding-args": "use --bind-to",
    "--output-filename": "use --mpi-args",
    "--network-interfaces": "use --mpi-args",
    "--prefix-output-with-timestamp": "use --mpi-args",
    "--ssh-port": "use ~/.ssh/config",
    "--ssh-identity-file": "use ~/.ssh/config",
    "--config-file": "set variables",
    "--hierarchical-allreduce": "set HVDLITE_BACKEND, if need be",
    "--torus-allreduce": "set HVDLITE_BACKEND, if need be",
    **dict.fromkeys(
        ("--cycle-time-ms", "--gloo", "--mpi", "--jsrun", "--tcp", "--num-nccl-streams", "-cb", "--check-build",
         "--start-timeout", "--disable-cache", "--min-np", "--max-np", "--min-num-proc", "--max-num-proc",
         "--slots-per-host", "--host-discovery-script", "--elastic-timeout", "--reset-limit", "--autotune"),
        _GONE,
    ),
}  # fmt: skip


def refuse_foreign_options(parser: argparse.ArgumentParser) -> None:
    """Let `parser` say of each what to use instead, and end."""
    for option in INSTEAD:
        parser.add_argument(option, action=_Refuse, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> NoReturn:
        option = option_string or ""
        whose = "no option of hvdrun" if INSTEAD[option] == _RANKS else "horovodrun's option, not hvdrun's"
        parser.error(f"{option} is {whose}: {INSTEAD[option]}; see docs/migrating.md")
