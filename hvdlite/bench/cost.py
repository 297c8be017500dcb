"""How long one allreduce takes, in closed form, for hvdlite's algorithms on equal hosts. Pure.

    ring                2 (P - 1) steps of latency + S / (P bandwidth), and a reduction in each of the first half
    doubling            log2(P) steps of latency + S / bandwidth; else two more, and S / bandwidth once more
    shared memory       one host: latency + S / bandwidth, both of the host
    hierarchical        shared memory, and a ring per local rank over its share; the rings share the link

P = ranks, S = bytes. `transfers.py` runs the same algorithms message by message; the tests hold one
against the other. A ring through a switch pays for its slowest link; doubling sends over the second level from all
hosts at once, so there oversubscription counts in full.

Source of the link's model: Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdlite.bench.cluster import Cluster

DEPTH = 2  # chunks of a ring that are under way at a time
ALGORITHMS = ("auto", "ring", "doubling", "hierarchical")


@dataclass(frozen=True, slots=True)
class Link:
    """Between two ranks: seconds of an empty message, and bytes per second."""

    latency: float
    bandwidth: float


def allreduce_seconds(nbytes: int, ranks: int, cluster: Cluster, algorithm: str = "auto") -> float:
    """Return the time of one allreduce without the engine's own part.

    Args:
        algorithm: one of `ALGORITHMS`; auto is the fastest of them, as a tuned table chooses.
    """
    if ranks == 1 or nbytes == 0:
        return 0.0
    if cluster.nodes(ranks) == 1:
        return shared_memory_seconds(nbytes, cluster)
    if algorithm != "auto":
        return _BY_NAME[algorithm](nbytes, ranks, cluster)
    return min(way(nbytes, ranks, cluster) for way in _BY_NAME.values())


def shared_memory_seconds(nbytes: float, cluster: Cluster) -> float:
    """Return the time among the ranks of one host."""
    return cluster.node_latency + nbytes / cluster.node_bandwidth


def ring_seconds(
    nbytes: float,
    ranks: int,
    link: Link,
    chunk: int,
    reduce_bandwidth: float,
    *,
    slow: float = 1.0,
    inner: Link | None = None,
) -> float:
    """Return the time of a ring whose slowest link is `link`.

    A chunk of a step may leave once that chunk of the step before has come and been reduced, and at most
    `DEPTH` are under way. So a step takes as long as its bytes, or as its chunks have to wait for each other.

    Args:
        slow: the share of the ring's links that are like `link`; a chunk waits that often for one.
        inner: the other links.
    """
    if ranks == 1:
        return 0.0
    part = nbytes / ranks
    n_chunks = max(1, -(-int(part) // chunk))
    sending = part / n_chunks / link.bandwidth
    adding = part / n_chunks / reduce_bandwidth
    abreast = min(n_chunks, DEPTH)
    hop = slow * (sending + link.latency)
    if inner is not None:
        hop += (1 - slow) * (part / n_chunks / inner.bandwidth + inner.latency)

    def step(work: float) -> float:
        return n_chunks * max(sending, (hop + work) / abreast)

    last = n_chunks * sending + link.latency
    return (ranks - 1) * step(adding) + (ranks - 2) * step(0.0) + max(last, step(0.0))


def doubling_seconds(nbytes: int, ranks: int, cluster: Cluster) -> float:
    """Return the time of recursive doubling over all ranks: each step at the slowest of its links."""
    power = 1 << (ranks.bit_length() - 1)
    distances = [1 << k for k in range(power.bit_length() - 1)]
    adding = nbytes / cluster.reduce_bandwidth
    seconds = sum(_exchange(nbytes, distance, ranks, cluster) + adding for distance in distances)
    if ranks > power:  # those above the power of two hand theirs over first, and get the result at the end
        seconds += 2 * _exchange(nbytes, power, ranks, cluster) + adding
        # Those that have nobody above send at once, over the link on which others still get what is handed over.
        seconds += nbytes / cluster.bandwidth
    return seconds


def _exchange(nbytes: int, distance: int, ranks: int, cluster: Cluster) -> float:
    """Return the time until all ranks have exchanged `nbytes` with the one `distance` away."""
    if distance < cluster.ranks_per_node and cluster.ranks_per_node % (2 * distance) == 0:
        return cluster.node_latency + nbytes / cluster.node_bandwidth
    link = _link(cluster, ranks, crossing=_crosses(distance, cluster))
    flows = min(cluster.ranks_per_node, ranks)
    narrow = cluster.oversubscription if _crosses(distance, cluster) else 1.0
    return link.latency + nbytes * flows * narrow / cluster.bandwidth


def _crosses(distance: int, cluster: Cluster) -> bool:
    below = cluster.nodes_per_switch * cluster.ranks_per_node
    return below > 0 and distance * 2 > below


def _link(cluster: Cluster, ranks: int, *, crossing: bool) -> Link:
    return Link(cluster.latency + (cluster.switch_latency if crossing else 0.0), cluster.bandwidth)


def _flat_ring(nbytes: int, ranks: int, cluster: Cluster) -> float:
    return ring_seconds(
        nbytes, ranks, _around(cluster, ranks), cluster.chunk, cluster.reduce_bandwidth,
        slow=1 / cluster.ranks_per_node, inner=Link(cluster.node_latency, cluster.node_bandwidth),
    )  # fmt: skip


def _hierarchical(nbytes: int, ranks: int, cluster: Cluster) -> float:
    """Reduce-scatter and all-gather in shared memory are together one allreduce there."""
    local, nodes = cluster.ranks_per_node, cluster.nodes(ranks)
    link = _around(cluster, ranks)
    shared = Link(link.latency, link.bandwidth / local)
    across = ring_seconds(nbytes / local, nodes, shared, cluster.chunk, cluster.reduce_bandwidth)
    return across + (shared_memory_seconds(nbytes, cluster) + cluster.node_latency if local > 1 else 0.0)


def _around(cluster: Cluster, ranks: int) -> Link:
    """Return the slowest link of a ring over the hosts in order: one stream crosses each border."""
    below = cluster.nodes_per_switch
    crossing = 0 < below < cluster.nodes(ranks)
    link = _link(cluster, ranks, crossing=crossing)
    if not crossing:
        return link
    return Link(link.latency, min(cluster.bandwidth, cluster.bandwidth * below / cluster.oversubscription))


_BY_NAME: Mapping[str, Callable[[int, int, Cluster], float]] = {
    "ring": _flat_ring,
    "doubling": doubling_seconds,
    "hierarchical": _hierarchical,
}
