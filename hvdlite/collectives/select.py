"""Which backend runs a collective, and why. A pure decision, and the objects it chooses from.

All inputs of the decision are equal on all ranks, so all ranks choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.collectives.base import Backend
from hvdlite.collectives.hierarchical import HierarchicalBackend, make_levels
from hvdlite.collectives.local import LocalBackend
from hvdlite.collectives.mpi_native import MpiNativeBackend
from hvdlite.collectives.reference import ReferenceBackend
from hvdlite.collectives.ring import CHUNK_BYTES, RingBackend
from hvdlite.collectives.shared_memory import SharedMemoryBackend, segment_bytes
from hvdlite.collectives.tree import TreeBackend, is_tiny
from hvdlite.comm.base import Communicator
from hvdlite.dtypes import ReduceOp, name_of
from hvdlite.errors import ConfigError
from hvdlite.kernels import Kernels
from hvdlite.messages import Knobs
from hvdlite.topology import Topology

BACKENDS = ("local", "shared_memory", "hierarchical", "tree", "ring", "mpi_native", "reference")
HIERARCHICAL_KINDS = ("allreduce", "broadcast")  # what hierarchical does in a way of its own
SMALL_BYTES = 16 * 1024  # where log2(P) full-size steps stop beating 2 (P - 1) steps of 1/P
_LEAST_AREA = 64  # bytes of a piece for each rank: one cache line
PIECE_BYTES = 1024 * 1024
MOST_PIECE_BYTES = 4 * 1024 * 1024  # that a tuner may try; needs as much room in the segment


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend's name and the reason, a sentence for the user."""

    backend: str
    reason: str


def choose(
    kind: str,
    nbytes: int,
    dtype: np.dtype[Any],
    op: ReduceOp | None,
    topology: Topology,
    *,
    shared_memory_available: bool,
    native_available: bool,
    hierarchical_available: bool = False,
    forced: str | None = None,
    small_bytes: int = SMALL_BYTES,
) -> Choice:
    """Choose the backend for one collective of `nbytes` bytes.

    Args:
        kind: allreduce, allgather, broadcast, alltoall or reducescatter.
        op: the reduction, or None where nothing is reduced.
        shared_memory_available: the group has a shared segment, which implies one host.
        native_available: the transport is MPI.
        hierarchical_available: the group spans hosts, some with several ranks, and has groups for both levels.
        forced: the user's own choice; None or "auto" lets the table decide.
        small_bytes: at most this many bytes are a small message between hosts.
    """
    if topology.size == 1:
        return Choice("local", "the process set has one rank, so there is nobody to talk to")
    if forced not in (None, "auto"):
        there = {
            "shared_memory": shared_memory_available, "mpi_native": native_available,
            "hierarchical": hierarchical_available,
        }  # fmt: skip
        return _forced(str(forced), there)
    what = f"{kind} of {nbytes} bytes of {name_of(dtype)}" + (f" ({op.name})" if op is not None else "")
    if shared_memory_available:
        return Choice("shared_memory", f"{what}: all {topology.size} ranks are on one host and share memory")
    where = _where(topology)
    if kind == "allreduce" and nbytes <= small_bytes and is_tiny(nbytes // dtype.itemsize, dtype, topology.size):
        return Choice("tree", f"{what}: {where}, and one trip from everybody to everybody takes fewest steps")
    if hierarchical_available and kind in HIERARCHICAL_KINDS and op is not ReduceOp.ADASUM:
        return Choice("hierarchical", f"{what}: {where}, and each byte should cross the network once")
    if nbytes <= small_bytes:
        return Choice("tree", f"{what}: {where}, and at most {small_bytes} bytes go fewest steps fastest")
    return Choice("ring", f"{what}: {where}, and more than {small_bytes} bytes go fewest bytes fastest")


def _where(topology: Topology) -> str:
    if topology.n_hosts == 1:
        return f"{topology.size} ranks on one host without shared memory"
    return f"{topology.size} ranks on {topology.n_hosts} hosts"


def _forced(name: str, there: Mapping[str, bool]) -> Choice:
    if name not in BACKENDS or name == "local":
        known = ", ".join(BACKENDS[1:])
        raise ConfigError(f"backend {name!r} is unknown for more than one rank; use auto, {known}.")
    if not there.get(name, True):
        return Choice("ring", f"{name} was asked for, but {_LACKING[name]}; ring works everywhere")
    return Choice(name, f"{name} was asked for")


_LACKING = {
    "shared_memory": "these ranks share no memory",
    "mpi_native": "the transport is not MPI",
    "hierarchical": "these ranks are not several on each of several hosts",
}


class Backends(Mapping[str, Backend]):
    """The backends of one communicator, built when first asked for.

    Building is local unless `tune` was called; segments and groups were made before, collectively.

    Args:
        release: gives back what was made before. Collective.
    """

    def __init__(
        self, builders: Mapping[str, Callable[[], Backend]], release: Callable[[], None] | None = None
    ) -> None:
        self._builders, self._built = dict(builders), dict[str, Backend]()
        self._release = release
        self._knobs: Knobs | None = None

    @property
    def shared_memory_available(self) -> bool:
        return "shared_memory" in self._builders

    @property
    def native_available(self) -> bool:
        return "mpi_native" in self._builders

    @property
    def hierarchical_available(self) -> bool:
        return "hierarchical" in self._builders

    def __getitem__(self, name: str) -> Backend:
        backend = self._built.get(name)
        if backend is None:
            backend = self._built[name] = self._builders[name]()
            if self._knobs is not None:
                backend.tune(self._knobs)
        return backend

    def tune(self, knobs: Knobs) -> None:
        """Let all backends, also those built later, work with these sizes. Collective, between collectives."""
        self._knobs = knobs
        for backend in self._built.values():
            backend.tune(knobs)

    def __iter__(self) -> Any:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)

    def close(self) -> None:
        """Close what was built, and what it was built on. Collective."""
        for backend in self._built.values():
            backend.close()
        self._built.clear()
        if self._release is not None:
            self._release()
            self._release = None


def make_backends(
    comm: Communicator,
    kernels: Kernels,
    *,
    shared_memory: bool = True,
    hierarchical: bool = True,
    piece_bytes: int = PIECE_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
    peer_memory: bool = True,
    direct_bytes: int | None = None,
    small_bytes: int = SMALL_BYTES,
    tunable: bool = False,
) -> Backends:
    """Return the backends that `comm` can have. Collective, for the shared segment and the groups of each host.

    Args:
        shared_memory: False leaves shared memory out (equal on all ranks).
        hierarchical: False leaves hierarchical collectives out (equal on all ranks).
        piece_bytes: how much of each rank's data is in shared memory at a time.
        chunk_bytes: how much the ring sends at a time.
        peer_memory: False leaves the peers' memory alone (equal on all ranks).
        direct_bytes: from this size allreduce on one host goes through the peers' memory, where it may. None: where
            that is faster, too (`SharedMemoryBackend`).
        small_bytes: at most this many bytes are a small message between hosts.
        tunable: leave room for the pieces that a tuner may ask for.
    """
    piece_bytes = max(piece_bytes, _LEAST_AREA * comm.size)
    if comm.size == 1:
        return Backends({"local": lambda: LocalBackend(comm, kernels)})
    peers = comm.peer_memory() if shared_memory and peer_memory else None
    builders: dict[str, Callable[[], Backend]] = {
        "reference": lambda: ReferenceBackend(comm, kernels),
        "ring": lambda: RingBackend(comm, kernels, chunk_bytes),
        "tree": lambda: TreeBackend(comm, kernels, chunk_bytes),
    }
    if comm.native is not None:
        builders["mpi_native"] = lambda: MpiNativeBackend(comm, kernels, chunk_bytes)
    room = segment_bytes(max(piece_bytes, MOST_PIECE_BYTES if tunable else 0))
    segment = comm.shared_segment(room) if shared_memory else None
    if segment is not None:
        kept = segment
        builders["shared_memory"] = lambda: SharedMemoryBackend(comm, kernels, kept, piece_bytes, peers, direct_bytes)
    topology = comm.topology
    if hierarchical and 1 < topology.n_hosts < comm.size:
        levels = make_levels(comm, room if shared_memory else 0)
        builders["hierarchical"] = lambda: HierarchicalBackend(
            comm, kernels, levels, piece_bytes, chunk_bytes, small_bytes
        )
        return Backends(builders, levels.close)
    return Backends(builders, None if segment is None else segment.close)
