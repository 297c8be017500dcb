"""horovodrun's YAML file of options (`--config-file`). What the command line says beats it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from typing import Any

from hvdlite.errors import LaunchError

from .elastic.options import BY_KEY as _ELASTIC
from .elastic.options import from_file
from .horovodrun import SETTINGS, WITHOUT_EFFECT
from .hosts import Faults

# Keys besides those of settings: what becomes of them is in `merge`.
_CONTROLLER, _ENABLED, _WITH_TIME = "controller", "stall_check.enabled", "logging.with_timestamp"
_BY_KEY = {one.key: one for one in SETTINGS.values()}
_FLAGS = {_ENABLED, _WITH_TIME, *(key for key, one in _BY_KEY.items() if not one.metavar)}
_WITHOUT_EFFECT = {
    "params.cycle_time_ms": "--cycle-time-ms",
    "params.hierarchical_allgather": "--hierarchical-allgather",
    "params.torus_allreduce": "--torus-allreduce",
    "library_options.mpi_threads_disable": "--mpi-threads-disable",
    "library_options.num_nccl_streams": "--num-nccl-streams",
    "library_options.gloo_timeout_seconds": "--gloo-timeout-seconds",
}


def read(text: str, path: str) -> dict[str, Any]:
    """Return what a file says as `section.key` to value. `path` is for messages."""
    try:
        import yaml
    except ImportError as error:
        raise LaunchError(f"--config-file {path}: PyYAML is needed to read it: pip install 'hvdlite[yaml]'") from error
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LaunchError(f"--config-file {path}: not YAML: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise LaunchError(f"--config-file {path}: expected sections such as params:, found {found!r}")
    return dict(_flat(found))


def merge(options: argparse.Namespace, said: dict[str, Any], path: str) -> list[str]:
    """Put what the file says into `options` where the command line said nothing.

    Returns:
        A line for each key that changes nothing.

    Raises:
        Faults: values that cannot be read.
    """
    notes: list[str] = []
    faults: list[str] = []
    for key, value in said.items():
        where = f"--config-file {path}: {key}"
        if value is None:
            continue
        if key in _FLAGS and not isinstance(value, bool):
            faults.append(f"{where}: expected true or false, found {value!r}")
        elif key in _BY_KEY:
            _default(options, _BY_KEY[key].name, str(int(value)) if isinstance(value, bool) else _text(value))
        elif key == _ENABLED:
            _default(options, "stall_check", value)
        elif key == _WITH_TIME:
            _default(options, "log_hide_time", str(int(not value)))
        elif key in _ELASTIC:
            try:
                _default(options, _ELASTIC[key].dest, from_file(_ELASTIC[key], value))
            except (ValueError, argparse.ArgumentTypeError) as error:
                faults.append(f"{where}: {error}")
        elif key == _CONTROLLER:
            notes += _controller(options, str(value).lower(), where, faults)
        else:
            notes.append(f"{where} {_unused(key)}")
    if faults:
        raise Faults(faults)
    return notes


def _default(options: argparse.Namespace, name: str, value: Any) -> None:
    if getattr(options, name) is None:
        setattr(options, name, value)


def _unused(key: str) -> str:
    if key in _WITHOUT_EFFECT:
        return f"has no effect: {WITHOUT_EFFECT[_WITHOUT_EFFECT[key]][1]}"
    near = difflib.get_close_matches(
        key, [*_BY_KEY, *_ELASTIC, *_WITHOUT_EFFECT, _ENABLED, _WITH_TIME, _CONTROLLER], n=1
    )
    return "is not a key and changes nothing" + (f". Did you mean {near[0]}?" if near else "")


def _controller(options: argparse.Namespace, name: str, where: str, faults: list[str]) -> list[str]:
    if name == "gloo":
        return [f"{where}: gloo has no effect: {WITHOUT_EFFECT['--gloo'][1]}"]
    if name not in ("mpi", "jsrun"):
        faults.append(f"{where}: expected mpi, gloo or jsrun, found {name!r}")
    elif name == "jsrun" and options.launcher == "auto":
        options.launcher = "jsrun"
    return []


def _flat(sections: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in sections.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield str(name), value


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
