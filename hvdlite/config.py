"""Settings: one frozen value, read once from the environment, equal on every rank where it must be.

The only file of the core that touches `os.environ`. A setting `name` is the variable
`HVDLITE_NAME`; the `HOROVOD_*` names that mean the same are aliases. What the settings
do is the business of those who read them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvdlite.errors import ConfigError, describe_ranks

PREFIX = "HVDLITE_"
# What Open MPI, MPICH and its kin, PMIx, Cray's PALS, LSF's jsrun and Slurm give to each process that they start.
_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK", "SLURM_PROCID",
)  # fmt: skip
TEST_PREFIX = "HVDLITE_TEST_"  # belongs to the test suite; never a setting

T = TypeVar("T")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of value: its name in messages, how text becomes a value (ValueError if not), and back."""

    name: str
    parse: Callable[[str], T]
    render: Callable[[T], str] = str


@dataclass(frozen=True)
class Knob:
    """What is known of a setting besides its default.

    Attributes:
        kind: how its text is read.
        help: what it does, with its unit.
        shared: whether all ranks must have the same value.
        horovod: Horovod's name for it, without `HOROVOD_`.
    """

    kind: Kind[Any]
    help: str
    shared: bool = True
    horovod: str = ""


def knob(default: T, kind: Kind[T], help: str, *, shared: bool = True, horovod: str = "") -> T:
    """Declare a field of Config. The arguments are those of `Knob`."""
    metadata = {"knob": Knob(kind, help, shared, horovod)}
    return dataclasses.field(default=default, metadata=metadata)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in ("true", "yes", "on"):
        return True
    if word in ("false", "no", "off"):
        return False
    return int(word) > 0  # Horovod's rule


def _cores(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(",")) if text.strip() else ()


def _one_of(*words: str) -> Kind[str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError
        return word

    return Kind("one of " + ", ".join(words), parse)


BYTES = Kind("whole number of bytes, 0 or more", _count)
PIECE = Kind("whole number of bytes, 1 or more", _positive)
COUNT = Kind("whole number, 0 or more", _count)
NATURAL = Kind("whole number, 1 or more", _positive)
SECONDS = Kind("number of seconds, 0 or more", _seconds)
FRACTION = Kind("number from 0 to 1", _fraction)
FLAG = Kind("0 or 1, false or true", _flag, lambda value: str(int(value)))
TEXT: Kind[str] = Kind("text", str)
CORES = Kind("core numbers separated by commas", _cores, lambda cores: ",".join(map(str, cores)))
BACKENDS = _one_of("auto", "shared_memory", "hierarchical", "ring", "tree", "mpi_native", "reference")
LEVELS = _one_of("trace", "debug", "info", "warning", "error", "fatal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of one process. Immutable; `compare` checks that the ranks agree."""

    # What is fused, and what is remembered of earlier rounds.
    fusion_threshold: int = knob(
        64 * 2**20, BYTES, "largest fused buffer, bytes; 0: no fusion", horovod="FUSION_THRESHOLD"
    )
    cache_capacity: int = knob(1024, COUNT, "requests remembered per process set; 0: none", horovod="CACHE_CAPACITY")
    learn_schedule: bool = knob(True, FLAG, "run what the ranks repeat without asking each time")
    disable_group_fusion: bool = knob(
        False, FLAG, "fuse the tensors of a grouped call only with each other", horovod="DISABLE_GROUP_FUSION"
    )

    # How bytes move.
    backend: str = knob("auto", BACKENDS, "algorithm for collectives; auto: chosen by size and hosts")
    shared_memory: bool = knob(True, FLAG, "use shared memory between the ranks of a host")
    shared_memory_dir: str = knob("/dev/shm", TEXT, "where the segments are made, a directory in memory", shared=False)
    peer_memory: bool = knob(
        True, FLAG, "let ranks of a host copy straight between their tensors, where they may and it is faster"
    )
    shared_memory_piece: int = knob(2**20, PIECE, "largest piece reduced at once in shared memory, bytes per rank")
    hierarchical: bool = knob(
        True, FLAG, "between hosts, combine the ranks of a host in shared memory first",
        horovod="HIERARCHICAL_ALLREDUCE",
    )  # fmt: skip
    small_message: int = knob(16 * 2**10, BYTES, "up to this size ranks on several hosts use the tree, bytes")
    ring_chunk: int = knob(60 * 2**10, PIECE, "a ring transfer is cut into chunks of this size, bytes")
    spin: float = knob(50e-6, SECONDS, "a waiting thread spins this long before it sleeps, seconds", shared=False)
    thread_affinity: tuple[int, ...] = knob(
        (),
        CORES,
        "core of the engine thread, by local rank; empty: not pinned",
        shared=False,
        horovod="THREAD_AFFINITY",
    )

    # What is found out while it runs.
    autotune: bool = knob(False, FLAG, "find good sizes in the first steps of training", horovod="AUTOTUNE")
    autotune_file: str = knob(
        "", TEXT, "rank 0 saves what tuning found in this file, and loads it when the next job starts"
    )
    autotune_log: str = knob(
        "", TEXT, "rank 0 writes what tuning measures into this file, as CSV", shared=False, horovod="AUTOTUNE_LOG"
    )
    autotune_warmup_samples: int = knob(
        3, COUNT, "samples before tuning starts", shared=False, horovod="AUTOTUNE_WARMUP_SAMPLES"
    )
    autotune_steps_per_sample: int = knob(
        10, NATURAL, "steps of training per sample", shared=False, horovod="AUTOTUNE_STEPS_PER_SAMPLE"
    )
    autotune_bayes_opt_max_samples: int = knob(
        40, NATURAL, "samples after which tuning has ended", shared=False, horovod="AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
    )
    autotune_gaussian_process_noise: float = knob(
        0.8, FRACTION, "accepted, and without effect: noise is measured", shared=False,
        horovod="AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    )  # fmt: skip

    # When something is wrong.
    stall_warning: float = knob(
        60.0,
        SECONDS,
        "warn when a tensor waits this long for other ranks, seconds; 0: no stall watch at all",
        horovod="STALL_CHECK_TIME_SECONDS",
    )
    stall_shutdown: float = knob(
        0.0,
        SECONDS,
        "stop the job when a tensor waits this long for other ranks, seconds; 0: never",
        horovod="STALL_SHUTDOWN_TIME_SECONDS",
    )
    exit_grace: float = knob(3.0, SECONDS, "a failed rank leaves the others this long to end, seconds", shared=False)
    allow_size_mismatch: bool = knob(
        False, FLAG, "let a process run alone although the launcher announced more ranks", shared=False
    )

    elastic_dir: str = knob(
        "", TEXT, "hvd.elastic writes commits here, and a job that is started again goes on from them"
    )
    elastic_in_place: bool = knob(
        False, FLAG, "hvd.elastic goes on with the ranks that are left, where MPI allows it (mpirun --with-ft ulfm)"
    )
    elastic_in_place_timeout: float = knob(
        30.0, SECONDS, "a lost rank leaves the others this long to go on without it, or the job ends, seconds"
    )
    elastic_min_np: int = knob(1, NATURAL, "with fewer ranks left hvd.elastic does not go on in place")

    # What is told.
    log_level: str = knob("warning", LEVELS, "least level that is logged", shared=False, horovod="LOG_LEVEL")
    log_hide_time: bool = knob(False, FLAG, "log lines without the time", shared=False, horovod="LOG_HIDE_TIME")
    summary: bool = knob(
        False, FLAG, "rank 0 prints at the end what was communicated, and how much of it was hidden", shared=False
    )
    timeline: str = knob(
        "",
        TEXT,
        "file to record the timeline in; with {rank} in its name one per rank, else of rank 0 only; DYNAMIC: none yet",
        shared=False,
        horovod="TIMELINE",
    )
    timeline_mark_cycles: bool = knob(
        False, FLAG, "mark in the timeline when ranks agree on what runs next", shared=False,
        horovod="TIMELINE_MARK_CYCLES",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, one in _knobs():
            value = getattr(self, name)
            try:
                one.kind.parse(one.kind.render(value))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{name}={value!r}: expected {one.kind.name} ({one.help})") from error

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the settings from `environ` (default: the process' own).

        An empty variable counts as unset, and `HVDLITE_*` wins over `HOROVOD_*`. Other
        `HOROVOD_*` names are ignored: they may belong to tools, or have no meaning here.

        Raises:
            ConfigError: a value cannot be read, or an `HVDLITE_*` name is not a setting.
        """
        if environ is None:
            environ = os.environ
        _refuse_unknown(environ)
        values: dict[str, Any] = {}
        for name, one in _knobs():
            own, alias = variable(name), f"HOROVOD_{one.horovod}"
            if environ.get(own):
                values[name] = _parse(own, environ[own], one)
            elif one.horovod and environ.get(alias):
                values[name] = _parse(alias, environ[alias], one)
        if not environ.get(variable("stall_warning")) and _horovod_disables_stall_check(environ):
            values["stall_warning"] = 0.0
        return cls(**values)

    @property
    def may_tune(self) -> bool:
        """Whether sizes may change while it runs. Equal on all ranks."""
        return self.autotune or bool(self.autotune_file)

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be equal on every rank, as text."""
        return {name: one.kind.render(getattr(self, name)) for name, one in _knobs() if one.shared}


def compare(fingerprints: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have the same settings; `fingerprints` is in rank order.

    Raises:
        ConfigError: names every setting that differs, its values, and the ranks.
    """
    problems = []
    for name in dict.fromkeys(name for one in fingerprints for name in one):
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(fingerprints):
            by_value.setdefault(one.get(name, "(unknown)"), []).append(rank)
        if len(by_value) > 1:
            sides = "; ".join(f"{value} on {describe_ranks(ranks)}" for value, ranks in by_value.items())
            problems.append(f"setting {variable(name)} differs between ranks: {sides}.")
    if problems:
        problems.append("Every rank needs the same value; export the variable on all hosts (mpirun -x NAME).")
        raise ConfigError(" ".join(problems))


def given(environ: Mapping[str, str] | None = None) -> set[str]:
    """Return the names of the settings that the user has set, also to their default."""
    if environ is None:
        environ = os.environ
    return {
        name
        for name, one in _knobs()
        if environ.get(variable(name)) or (one.horovod and environ.get(f"HOROVOD_{one.horovod}"))
    }


def variable(name: str) -> str:
    """Return the environment variable of the setting `name`."""
    return PREFIX + name.upper()


def launcher_size(environ: Mapping[str, str] | None = None) -> tuple[int, str] | None:
    """Return how many ranks the surroundings announce, and the variable that says so; None if nothing does.

    Most specific first: an `mpirun` inside a Slurm allocation overrules Slurm. Slurm's own
    variables count only where Slurm started this process (`SLURM_PROCID`): in an
    interactive allocation they merely say what could be started.
    """
    if environ is None:
        environ = os.environ
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    if "SLURM_PROCID" in environ:
        names += ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
    for name in names:
        text = environ.get(name, "")
        if text.isdecimal():
            return int(text), name
    return None


def started_by_launcher(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a launcher that MPI knows started this process, if only as one rank."""
    if environ is None:
        environ = os.environ
    return any(name in environ for name in _RANK_VARIABLES)


def launcher_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return which rank the launcher says that this process is, before MPI has started; None if it says nothing."""
    if environ is None:
        environ = os.environ
    return next((int(environ[name]) for name in _RANK_VARIABLES if environ.get(name, "").isdecimal()), None)


def environment() -> dict[str, str]:
    """Return a copy of the process' environment."""
    return dict(os.environ)


def apply_environment(values: Mapping[str, str]) -> None:
    """Set variables that the user has not set. Libraries started later see them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_environment(values: Mapping[str, str]) -> None:
    """Set variables, whatever the user has set. For programs that own their process, as benchmarks do."""
    os.environ.update(values)


def settings_reference() -> str:
    """Return the text of docs/reference/settings.md."""
    lines = [
        "# Settings",
        "",
        "Made from `hvdlite/config.py` by `make docs`; do not edit.",
        "",
        "A setting is an environment variable, read by `hvd.init()`. Empty means unset. The `HVDLITE_` name wins over",
        "the `HOROVOD_` name. A misspelt `HVDLITE_` name is an error. *All ranks*: the value must be the same on all",
        "ranks, which `init()` checks.",
        "",
        "| Variable | Default | Value | Meaning | All ranks | Horovod's name |",
        "|---|---|---|---|---|---|",
    ]
    for field in dataclasses.fields(Config):
        one: Knob = field.metadata["knob"]
        default = one.kind.render(field.default)
        alias = f"`HOROVOD_{one.horovod}`" if one.horovod else ""
        cells = [f"`{variable(field.name)}`", f"`{default}`" if default else "", one.kind.name, one.help]
        lines.append("| " + " | ".join([*cells, "yes" if one.shared else "", alias]) + " |")
    lines += [
        "",
        "Of Horovod's names only those in the last column are aliases, and `HOROVOD_STALL_CHECK_DISABLE=1`, which is",
        "`HVDLITE_STALL_WARNING=0`. All other `HOROVOD_` names are ignored without a message, among them",
        "",
        "- `HOROVOD_CYCLE_TIME`: nothing waits for a cycle;",
        "- `HOROVOD_DYNAMIC_PROCESS_SETS`: process sets may always come and go.",
    ]
    return "\n".join(lines) + "\n"


def _knobs() -> list[tuple[str, Knob]]:
    return [(field.name, field.metadata["knob"]) for field in dataclasses.fields(Config)]


def _parse(name: str, text: str, one: Knob) -> Any:
    try:
        return one.kind.parse(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: expected {one.kind.name} ({one.help})") from error


def _horovod_disables_stall_check(environ: Mapping[str, str]) -> bool:
    name = "HOROVOD_STALL_CHECK_DISABLE"
    return bool(_parse(name, environ.get(name) or "0", Knob(FLAG, "no stall watch")))


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = {name.upper() for name, _ in _knobs()}
    problems = []
    for name in sorted(environ):
        short = name.removeprefix(PREFIX)
        if short == name or name.startswith(TEST_PREFIX) or short in known:
            continue
        near = difflib.get_close_matches(short, sorted(known), n=1)
        hint = f"Did you mean {PREFIX}{near[0]}?" if near else "docs/reference/settings.md lists all settings."
        problems.append(f"unknown setting {name}={environ[name]!r}. {hint}")
    if problems:
        raise ConfigError(" ".join(problems))
