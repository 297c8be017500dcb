"""Options that users bring along from horovodrun: most are settings of the ranks, a few have no effect here, and
some are refused with what to use instead."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from hvdlite.config import PREFIX, Config

_RANKS = "say -np N"

# Each ends hvdrun with a message. docs/migrating.md has the same as a table.
INSTEAD = {
    "--np": _RANKS,
    "--nproc-per-node": _RANKS,
    "--nproc_per_node": _RANKS,
}

# Accepted with one line that says why they change nothing: option, whether it takes a value, why.
_CHOSEN = "the algorithm is chosen by size and hosts, and HVDLITE_BACKEND overrules it"
WITHOUT_EFFECT = {
    "--cycle-time-ms": (True, "nothing waits for a cycle"),
    "--hierarchical-allgather": (False, _CHOSEN),
    "--no-hierarchical-allgather": (False, _CHOSEN),
    "--torus-allreduce": (False, _CHOSEN),
    "--no-torus-allreduce": (False, _CHOSEN),
    "--disable-cache": (False, "no checks of hosts are remembered"),
    "--gloo": (False, "MPI carries everything"),
    "--gloo-timeout-seconds": (True, "MPI carries everything"),
    "--mpi-threads-disable": (False, "threads are used only where the MPI has them"),
    "--no-mpi-threads-disable": (False, "threads are used only where the MPI has them"),
    "--num-nccl-streams": (True, "there are no streams of NCCL"),
}


def _megabytes(value: str) -> str:
    return str(int(float(value) * 2**20))


@dataclass(frozen=True)
class Setting:
    """An option that sets a setting on the ranks.

    Attributes:
        name: of the field of Config.
        key: where the YAML file has it, `section.key`.
        metavar: what its value is called; "" for one without a value.
        value: for one without a value, what it sets.
        convert: the option's unit to the setting's.
        opposite: the option that sets the contrary, if there is one.
        tuning: counts only together with --autotune.
    """

    name: str
    key: str
    metavar: str = ""
    value: str = "1"
    convert: Callable[[str], str] = str
    opposite: str = ""
    tuning: bool = False

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


SETTINGS = {
    "--fusion-threshold-mb": Setting("fusion_threshold", "params.fusion_threshold_mb", "N", convert=_megabytes),
    "--cache-capacity": Setting("cache_capacity", "params.cache_capacity", "N"),
    "--hierarchical-allreduce": Setting(
        "hierarchical", "params.hierarchical_allreduce", opposite="--no-hierarchical-allreduce"
    ),
    "--thread-affinity": Setting("thread_affinity", "library_options.thread_affinity", "CORES"),
    "--timeline-filename": Setting("timeline", "timeline.filename", "FILE"),
    "--timeline-mark-cycles": Setting(
        "timeline_mark_cycles", "timeline.mark_cycles", opposite="--no-timeline-mark-cycles"
    ),
    "--stall-check-warning-time-seconds": Setting("stall_warning", "stall_check.warning_time_seconds", "S"),
    "--stall-check-shutdown-time-seconds": Setting("stall_shutdown", "stall_check.shutdown_time_seconds", "S"),
    "--log-level": Setting("log_level", "logging.level", "LEVEL"),
    "--log-without-timestamp": Setting(
        "log_hide_time", "logging.hide_timestamp", opposite="--log-with-timestamp"
    ),
    "--autotune": Setting("autotune", "autotune.enabled", opposite="--no-autotune"),
    "--autotune-log-file": Setting("autotune_log", "autotune.log_file", "FILE", tuning=True),
    "--autotune-warmup-samples": Setting("autotune_warmup_samples", "autotune.warmup_samples", "N", tuning=True),
    "--autotune-steps-per-sample": Setting("autotune_steps_per_sample", "autotune.steps_per_sample", "N", tuning=True),
    "--autotune-bayes-opt-max-samples": Setting(
        "autotune_bayes_opt_max_samples", "autotune.bayes_opt_max_samples", "N", tuning=True
    ),
    "--autotune-gaussian-process-noise": Setting(
        "autotune_gaussian_process_noise", "autotune.gaussian_process_noise", "X", tuning=True
    ),
}  # fmt: skip
_SAME = {"--log-hide-timestamp": "--log-without-timestamp", "--no-log-hide-timestamp": "--log-with-timestamp"}
_NO_STALL_CHECK = "--no-stall-check"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take all of them; `exports`, `notes` and the merging of a file say what they mean."""
    settings = parser.add_argument_group("settings of the ranks (docs/reference/settings.md)")
    help_of = {field.name: field.metadata["knob"].help for field in dataclasses.fields(Config)}
    for option, one in SETTINGS.items():
        said = "largest fused buffer, MiB; 0: no fusion" if one.convert is _megabytes else help_of[one.name]
        if one.metavar:
            settings.add_argument(option, dest=one.name, metavar=one.metavar, help=said)
            continue
        for name, value, help in ((option, one.value, said), (one.opposite, "0", argparse.SUPPRESS)):
            settings.add_argument(name, dest=one.name, action="store_const", const=value, help=help)
    for name, of in _SAME.items():
        value = "1" if of in SETTINGS else "0"
        settings.add_argument(name, dest="log_hide_time", action="store_const", const=value, help=argparse.SUPPRESS)
    for name, watch in (("--stall-check", True), (_NO_STALL_CHECK, False)):
        settings.add_argument(
            name, dest="stall_check", action="store_const", const=watch,
            help="no stall watch at all" if name == _NO_STALL_CHECK else argparse.SUPPRESS,
        )  # fmt: skip
    parser.set_defaults(without_effect=[])
    for option, (takes_value, _) in WITHOUT_EFFECT.items():
        parser.add_argument(
            option, action=_Ignore, nargs=1 if takes_value else 0, dest="without_effect", help=argparse.SUPPRESS
        )
    for option in INSTEAD:
        parser.add_argument(option, action=_Refuse, nargs="?", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def exports(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the variables to hand to the ranks, `NAME=value`, and the faults in their values."""
    found: dict[str, str] = {}
    faults = []
    knobs = {field.name: field.metadata["knob"] for field in dataclasses.fields(Config)}
    for option, one in SETTINGS.items():
        text = getattr(options, one.name)
        if text is None or (one.tuning and options.autotune != "1"):  # as horovodrun does it
            continue
        try:
            value = one.convert(text)
            knobs[one.name].kind.parse(value)
        except (ValueError, OverflowError):
            faults.append(f"{option}: expected {knobs[one.name].kind.name}, found {text!r}")
        else:
            found[one.variable] = value
    if options.stall_check is False:
        found["HVDLITE_STALL_WARNING"] = "0"
    return [f"{name}={value}" for name, value in found.items()], faults


def notes(options: argparse.Namespace) -> list[str]:
    """Return a line for each option that changes nothing."""
    return [f"{name} has no effect: {WITHOUT_EFFECT[name][1]}" for name in dict.fromkeys(options.without_effect)]


class _Ignore(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        namespace.without_effect = [*namespace.without_effect, option_string]


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> NoReturn:
        option = option_string or ""
        parser.error(f"{option} is no option of hvdrun: {INSTEAD[option]}; see docs/migrating.md")
