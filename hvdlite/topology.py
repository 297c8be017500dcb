"""Who sits where: computed once from host names, never from MPI's shared-memory split.

(MPI_COMM_TYPE_SHARED follows NUMA domains with some settings, and is wrong then.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Topology:
    """The hosts of a group of ranks, seen from one of them.

    Attributes:
        rank: the rank that looks.
        hosts: host identity of each rank, in rank order.
    """

    rank: int
    hosts: tuple[str, ...]
    _ranks_of: dict[str, list[int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for rank, host in enumerate(self.hosts):
            self._ranks_of.setdefault(host, []).append(rank)

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def local_ranks(self) -> list[int]:
        """Ranks on this host, ascending."""
        return list(self._ranks_of[self.hosts[self.rank]])

    @property
    def local_rank(self) -> int:
        return self._ranks_of[self.hosts[self.rank]].index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self._ranks_of[self.hosts[self.rank]])

    @property
    def cross_ranks(self) -> list[int]:
        """Ranks that have this rank's local rank on their own host, ascending (this one included)."""
        mine = self.local_rank
        return sorted(ranks[mine] for ranks in self._ranks_of.values() if len(ranks) > mine)

    @property
    def cross_rank(self) -> int:
        return self.cross_ranks.index(self.rank)

    @property
    def cross_size(self) -> int:
        return len(self.cross_ranks)

    @property
    def n_hosts(self) -> int:
        return len(self._ranks_of)

    @property
    def is_homogeneous(self) -> bool:
        """True when every host has equally many ranks."""
        return len({len(ranks) for ranks in self._ranks_of.values()}) == 1

    def subset(self, rank: int, ranks: Sequence[int]) -> Topology:
        """Return the topology of the group `ranks`, seen from its member number `rank`."""
        return Topology(rank, tuple(self.hosts[r] for r in ranks))
