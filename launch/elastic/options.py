"""Options of jobs of changing size, with horovodrun's names, and what they mean together. Nothing is touched here."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..hosts import Faults

_PATIENCE = 600.0  # seconds, horovodrun's
_LONGEST = 3600  # seconds that a host is set aside at most, horovodrun's
_SLOTS = 1  # of a host without a number
_TIMEOUT = "HOROVOD_ELASTIC_TIMEOUT"


@dataclass(frozen=True)
class Terms:
    """What a job of changing size may do.

    Attributes:
        first: ranks that the first start waits for, where hosts are discovered.
        least: ranks; with fewer it does not run.
        most: ranks; None: as many as there are slots.
        script: a command that names the hosts; "": they do not change.
        slots: of a host that the script names without a number.
        timeout: seconds for which it waits for `least`.
        resets: how often it may start again; None: as often as it takes.
        cooldown: for how long hosts that failed are set aside, seconds; None: as long as others are enough.
        folder: for commits; "": hvdrun makes one.
    """

    first: int
    least: int
    most: int | None = None
    script: str = ""
    slots: int = _SLOTS
    timeout: float = _PATIENCE
    resets: int | None = None
    cooldown: tuple[float, float] | None = None
    folder: str = ""


@dataclass(frozen=True)
class Option:
    """An option, and where the YAML file has it: `elastic.key`."""

    names: tuple[str, ...]
    dest: str
    key: str
    parse: Callable[[str], Any]
    metavar: str
    help: str


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, more than 0")
    return value


SCRIPT = Option(("--host-discovery-script",), "discovery", "host_discovery_script", str, "COMMAND",
    "prints the hosts that there are now, a line each: host or host:slots; asked every second")  # fmt: skip
OPTIONS = (
    Option(("--min-np", "--min-num-proc"), "min_ranks", "min_np", _whole(1), "N",
        "start again after failures, with N ranks or more (default: as many as -np says)"),
    Option(("--max-np", "--max-num-proc"), "max_ranks", "max_np", _whole(1), "N",
        "ranks at most (default: -np; with --host-discovery-script as many as there are slots)"),
    Option(("--slots-per-host", "--slots"), "slots", "slots_per_host", _whole(1), "N",
        "ranks on a host that the script names without a number (default: 1)"),
    Option(("--elastic-timeout",), "elastic_timeout", "timeout", _seconds, "S",
        "end when there are fewer slots than --min-np for so long (default: 600)"),
    Option(("--reset-limit",), "reset_limit", "reset_limit", _whole(0), "N",
        "start again N times at most (default: no limit)"),
    Option(("--elastic-dir",), "elastic_dir", "dir", str, "DIR",
        "a folder for commits that all hosts see; the job goes on from those that are there"),
)  # fmt: skip
COOLDOWN = Option(("--blacklist-cooldown-range",), "cooldown", "blacklist_cooldown_range", _whole(1), "S",
    "seconds after which a host that failed is used again, longer each time (default: when others are not enough)",
)  # fmt: skip
BY_KEY = {f"elastic.{one.key}": one for one in (*OPTIONS, SCRIPT, COOLDOWN)}


def add_options(parser: argparse.ArgumentParser, where: Any) -> None:
    """Let `parser` take all of them; `where` is its group of options that say where ranks run."""
    group = parser.add_argument_group("jobs that start again, and of changing size (docs/elastic.md)")
    for one in OPTIONS:
        group.add_argument(*one.names, dest=one.dest, type=one.parse, metavar=one.metavar, help=one.help)
    group.add_argument(*COOLDOWN.names, dest=COOLDOWN.dest, type=COOLDOWN.parse, nargs=2, metavar=("MIN", "MAX"),
        help=COOLDOWN.help)  # fmt: skip
    where.add_argument(*SCRIPT.names, dest=SCRIPT.dest, metavar=SCRIPT.metavar, help=SCRIPT.help)


def from_file(one: Option, value: Any) -> Any:
    """Return what a value of the YAML file means. Raises ValueError, or as argparse's types do."""
    if one is COOLDOWN:
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"expected two numbers such as [10, 100], found {value!r}")
        return [one.parse(str(part)) for part in value]
    return one.parse(str(value))


def is_elastic(options: argparse.Namespace) -> bool:
    return options.min_ranks is not None or bool(options.discovery)


def faults(options: argparse.Namespace) -> list[str]:
    """Return what is wrong with them, before anything is known of hosts."""
    if not is_elastic(options):
        alone = [one.names[0] for one in (*OPTIONS, COOLDOWN) if getattr(options, one.dest) is not None]
        return [f"{name}: counts only with --min-np or --host-discovery-script" for name in alone]
    found = []
    ways = (("--raw", options.raw), ("--slurm-script", options.slurm_script),
            ("--kubernetes-manifest", options.kubernetes_manifest))  # fmt: skip
    found += [f"{name}: there hvdrun is not beside the job, and cannot start it again. {_remedy(name)}"
              for name, value in ways if value]  # fmt: skip
    if options.launcher in ("srun", "jsrun"):
        found.append(
            f"--launcher {options.launcher}: jobs that start again are started by mpirun, also inside of an allocation"
        )
    least, first, most = options.min_ranks, options.ranks, options.max_ranks
    if options.discovery and first is None and least is None:
        found.append("-np: how many ranks are to be there at first? Say -np N, or --min-np N for the least")
    if least and first and least > first:
        found.append(f"--min-np: {least} ranks at least, but -np {first} to begin with. Make one of them fit")
    if most and (least_wanted := first or least) and most < least_wanted:
        found.append(f"--max-np: {most} ranks at most, but {least_wanted} are wanted. Make one of them fit")
    if options.cooldown and not options.cooldown[0] <= options.cooldown[1] <= _LONGEST:
        low, high = options.cooldown
        found.append(f"--blacklist-cooldown-range: {low} {high}: expected MIN <= MAX <= {_LONGEST} seconds")
    return found


def _remedy(name: str) -> str:
    if name == "--slurm-script":
        return "Call hvdrun in a batch script of your own: examples/launch/elastic.sbatch"
    return "Leave it out, or leave out --min-np and --host-discovery-script"


def terms_from(options: argparse.Namespace, ranks: int, environ: Mapping[str, str]) -> Terms:
    """Return what an elastic job may do; `ranks` is the size that it should have."""
    least = options.min_ranks or ranks
    if least > ranks and not options.discovery:
        raise Faults([f"--min-np: {least} ranks at least, but there are {ranks} slots. Make one of them fit"])
    timeout = options.elastic_timeout
    if timeout is None:
        timeout = _from_environment(environ)
    return Terms(
        first=max(least, ranks),
        least=least,
        most=options.max_ranks or (None if options.discovery else ranks),
        script=options.discovery or "",
        slots=options.slots or _SLOTS,
        timeout=timeout,
        resets=options.reset_limit,
        cooldown=(options.cooldown[0], options.cooldown[1]) if options.cooldown else None,
        folder=options.elastic_dir or environ.get("HVDLITE_ELASTIC_DIR", ""),
    )


def _from_environment(environ: Mapping[str, str]) -> float:
    text = environ.get(_TIMEOUT, "")
    try:
        return _seconds(text) if text else _PATIENCE
    except argparse.ArgumentTypeError as error:
        raise Faults([f"{_TIMEOUT}: {error}"]) from None
