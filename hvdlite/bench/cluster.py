"""The machine of a prediction: hosts, links, switches and what hvdlite itself costs. Values and TOML."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlite.bench.units import parse_bytes, parse_rate, parse_time


def _setting(default: Any, section: str, key: str, read: Callable[[str], Any], unit: str) -> Any:
    return dataclasses.field(default=default, metadata={"place": (section, key), "read": read, "unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal hosts with one link each; bytes, seconds, and bytes per second.

    Attributes:
        ranks_per_node: that share a host and its link.
        bandwidth: of a host's link, each way.
        latency: from a rank's call until a tiny message has reached a rank of another host, software included.
        nodes_per_switch: hosts below one switch of the first level; 0 for all.
        oversubscription: links of the hosts below a switch together, by its links to the second level.
        switch_latency: what a message through the second level takes longer.
        node_bandwidth: bytes by the time of a large allreduce among the ranks of a host.
        node_latency: of a small allreduce among the ranks of a host.
        reduce_bandwidth: at which one rank adds what has come to what it holds, bytes of one operand.
        per_batch: of the engine for each batch that it runs: agreeing, packing, waking.
        chunk: of a ring's transfer. Two are under way at a time.
    """

    ranks_per_node: int = _setting(1, "nodes", "ranks_per_node", int, "a whole number")
    bandwidth: float = _setting(3.125e9, "link", "bandwidth", parse_rate, "")
    latency: float = _setting(20e-6, "link", "latency", parse_time, "")
    nodes_per_switch: int = _setting(0, "switch", "nodes", int, "a whole number")
    oversubscription: float = _setting(1.0, "switch", "oversubscription", float, "a number")
    switch_latency: float = _setting(0.0, "switch", "latency", parse_time, "")
    node_bandwidth: float = _setting(4e9, "nodes", "bandwidth", parse_rate, "")
    node_latency: float = _setting(20e-6, "nodes", "latency", parse_time, "")
    reduce_bandwidth: float = _setting(10e9, "nodes", "reduce_bandwidth", parse_rate, "")
    per_batch: float = _setting(100e-6, "engine", "per_batch", parse_time, "")
    chunk: int = _setting(512 * 2**10, "engine", "chunk", parse_bytes, "")

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "bandwidth", "node_bandwidth", "reduce_bandwidth", "chunk"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected more than 0")
        for name in ("latency", "switch_latency", "node_latency", "per_batch", "nodes_per_switch"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected 0 or more")
        if self.oversubscription < 1:
            raise ValueError(f"oversubscription={self.oversubscription!r}: expected 1 or more; 1 is none")

    def nodes(self, ranks: int) -> int:
        """Return how many hosts so many ranks fill."""
        return -(-ranks // self.ranks_per_node)


def read(path: Path) -> Cluster:
    """Return the cluster that a TOML file describes; what it does not name has its default.

    Raises:
        ValueError: the file, the section, the key and the value, with what is expected.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # of the extra `bench`

    try:
        return from_tables(tomllib.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_tables(tables: dict[str, Any]) -> Cluster:
    """Return the cluster of a TOML document that is read already."""
    places = {field.metadata["place"]: field for field in dataclasses.fields(Cluster)}
    values = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{section!r} stands outside of a section")
        for key, value in table.items():
            field = places.get((section, key))
            if field is None:
                raise ValueError(f"[{section}] {key!r} is unknown.{_hint(section, key)}")
            try:
                read_value = field.metadata["read"]
                values[field.name] = read_value(value if field.metadata["unit"] else str(value))
            except (ValueError, TypeError) as error:
                raise ValueError(f"[{section}] {key} = {value!r}: {field.metadata['unit'] or error}") from error
    return Cluster(**values)


def render(cluster: Cluster, title: str = "") -> str:
    """Return the TOML document of a cluster, which `read` understands."""
    lines = [f"# {line}" for line in title.splitlines()]
    by_section: dict[str, list[str]] = {}
    for field in dataclasses.fields(Cluster):
        section, key = field.metadata["place"]
        by_section.setdefault(section, []).append(
            f"{key} = {_text(getattr(cluster, field.name), field.metadata['read'])}"
        )
    for section, entries in by_section.items():
        lines += [f"[{section}]", *entries, ""]
    return "\n".join(lines)


def _text(value: Any, read_value: Callable[[str], Any]) -> str:
    if read_value is parse_rate:
        return f'"{value * 8 / 1e9:.6g} Gbit/s"'
    if read_value is parse_time:
        return f'"{value * 1e6:.6g} us"'
    return str(value)


def _hint(section: str, key: str) -> str:
    known = [".".join(field.metadata["place"]) for field in dataclasses.fields(Cluster)]
    near = difflib.get_close_matches(f"{section}.{key}", known, n=1)
    return f" Did you mean {near[0]}?" if near else f" Known are {', '.join(known)}."
