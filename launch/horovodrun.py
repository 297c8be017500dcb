"""Options of horovodrun and other launchers that users bring along: a few mean the same here, of the others we say
what to use instead."""

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
         "--slots-per-host", "--host-discovery-script", "--elastic-timeout", "--reset-limit"),
        _GONE,
    ),
}  # fmt: skip


# Flags that hvdrun takes over from horovodrun, and the settings that they are. docs/migrating.md has them, too.
AUTOTUNE = {
    "--autotune-log-file": ("HVDLITE_AUTOTUNE_LOG", "FILE", "write what tuning measures into FILE"),
    "--autotune-warmup-samples": ("HVDLITE_AUTOTUNE_WARMUP_SAMPLES", "N", "samples before tuning starts"),
    "--autotune-steps-per-sample": ("HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE", "N", "steps of training per sample"),
    "--autotune-bayes-opt-max-samples": ("HVDLITE_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "N", "samples at most"),
    "--autotune-gaussian-process-noise": ("HVDLITE_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "X", "without effect"),
}


def add_autotune_options(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take what concerns tuning; `autotune_exports` says what it means."""
    add = parser.add_argument
    add("--autotune", action="store_true", help="find good sizes in the first steps of training")
    for option, (variable, metavar, what) in AUTOTUNE.items():
        add(option, dest=variable, metavar=metavar, help=f"with --autotune: {what}")


def autotune_exports(options: argparse.Namespace) -> list[str]:
    """Return the variables to hand to the ranks, `NAME=value`. Without --autotune none, as horovodrun does it."""
    if not options.autotune:
        return []
    values = {variable: getattr(options, variable) for variable, _, _ in AUTOTUNE.values()}
    return ["HVDLITE_AUTOTUNE=1", *(f"{name}={value}" for name, value in values.items() if value is not None)]


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
