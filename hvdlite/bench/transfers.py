"""An allreduce message by message: ranks are programs, links are queues, and time is a heap. Pure.

Slow, and exact where the closed forms of `cost.py` are not: it shows what they leave out, and checks them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass

from hvdlite.bench.cluster import Cluster
from hvdlite.collectives.schedules import doubling_steps, ring_steps, split_evenly


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a message over; the rank goes on at once."""

    to: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the next message of a rank."""

    by: int


@dataclass(frozen=True, slots=True)
class Work:
    """Compute for some seconds."""

    seconds: float


Act = Send | Receive | Work
Program = Generator[Act, None, None]


def run(programs: Sequence[Iterator[Act]], cluster: Cluster) -> list[float]:
    """Return when each rank's program has ended, in seconds from the common start.

    A message occupies all links of its way from when the last of them is free.

    Raises:
        RuntimeError: ranks wait for messages that nobody sends.
    """
    order = itertools.count()  # of what happens at one time
    events = [(0.0, next(order), rank) for rank in range(len(programs))]
    free: dict[Hashable, float] = defaultdict(float)  # when a link is
    arrived: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    waiting: dict[tuple[int, int], int] = {}
    ended = [-1.0] * len(programs)
    held: dict[int, Act] = {}  # a Receive that is tried again

    while events:
        now, _, rank = heapq.heappop(events)
        act = held.pop(rank, None) or next(programs[rank], None)
        if act is None:
            ended[rank] = now
        elif isinstance(act, Work):
            heapq.heappush(events, (now + act.seconds, next(order), rank))
        elif isinstance(act, Send):
            pair = (rank, act.to)
            arrived[pair].append(_transfer(now, act.nbytes, rank, act.to, free, cluster))
            heapq.heappush(events, (now, next(order), rank))
            if pair in waiting:
                heapq.heappush(events, (now, next(order), waiting.pop(pair)))
        else:
            pair = (act.by, rank)
            if arrived[pair]:
                heapq.heappush(events, (max(now, arrived[pair].popleft()), next(order), rank))
            else:
                held[rank], waiting[pair] = act, rank
    if waiting:
        raise RuntimeError(f"messages that nobody sends (from, to): {sorted(waiting)}")
    return ended


def _transfer(now: float, nbytes: float, by: int, to: int, free: dict[Hashable, float], cluster: Cluster) -> float:
    """Occupy the links between two ranks, and return when the message is there."""
    links, latency = _way(by, to, cluster)
    start = max([now, *(free[link] for link, _ in links)])
    for link, bandwidth in links:
        free[link] = start + nbytes / bandwidth
    return start + nbytes / min(bandwidth for _, bandwidth in links) + latency


def _way(by: int, to: int, cluster: Cluster) -> tuple[list[tuple[Hashable, float]], float]:
    """Return the links that a message occupies, with their bandwidths, and its latency."""
    sender, receiver = by // cluster.ranks_per_node, to // cluster.ranks_per_node
    if sender == receiver:
        return [(("memory", by, to), cluster.node_bandwidth)], cluster.node_latency
    links: list[tuple[Hashable, float]] = [(("out", sender), cluster.bandwidth), (("in", receiver), cluster.bandwidth)]
    below = cluster.nodes_per_switch
    if below == 0 or sender // below == receiver // below:
        return links, cluster.latency
    upper = cluster.bandwidth * below / cluster.oversubscription
    links += [(("up", sender // below), upper), (("down", receiver // below), upper)]
    return links, cluster.latency + cluster.switch_latency


def ring_program(rank: int, size: int, nbytes: int, cluster: Cluster) -> Program:
    """Yield what one rank does in hvdlite's ring: the schedule and the order of `collectives/ring.py`."""
    bounds = split_evenly(nbytes, size)
    longest = bounds[1]
    n_parts = max(1, -(-longest // cluster.chunk))
    jobs = [(step, j) for step in ring_steps(rank, size) for j in range(n_parts)]
    right, left = (rank + 1) % size, (rank - 1) % size

    def length(run: int, j: int) -> int:
        parts = split_evenly(bounds[run + 1] - bounds[run], n_parts)
        return parts[j + 1] - parts[j]

    def send(t: int) -> Send:
        step, j = jobs[t]
        return Send(right, length(step.send, j))

    yield send(0)
    for t, (step, j) in enumerate(jobs):
        following = t + 1 < len(jobs)
        if following and n_parts > 1:
            yield send(t + 1)
        yield Receive(left)
        if step.reduce:
            yield Work(length(step.receive, j) / cluster.reduce_bandwidth)
        if following and n_parts == 1:
            yield send(t + 1)


def doubling_program(rank: int, size: int, nbytes: int, cluster: Cluster) -> Program:
    """Yield what one rank does in recursive doubling."""
    for step in doubling_steps(rank, size):
        if step.sends:
            yield Send(step.partner, nbytes)
        if step.receives:
            yield Receive(step.partner)
        if step.reduces:
            yield Work(nbytes / cluster.reduce_bandwidth)


def allreduce_seconds(nbytes: int, ranks: int, cluster: Cluster, algorithm: str) -> float:
    """Return the time of the slowest rank; `ring` or `doubling`, flat over all ranks."""
    program = {"ring": ring_program, "doubling": doubling_program}[algorithm]
    return max(run([program(rank, ranks, nbytes, cluster) for rank in range(ranks)], cluster))
