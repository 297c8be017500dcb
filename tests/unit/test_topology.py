"""Who sits where."""

from __future__ import annotations

import pytest

from hvdlite.topology import Topology

LAYOUTS = {
    "one rank": "a",
    "one host": "aaaa",
    "by node": "aaabbb",
    "round robin": "abcabc",
    "uneven": "aaabccc",
    "one each": "abcd",
    "mixed": "abbacab",
}


@pytest.fixture(params=list(LAYOUTS.values()), ids=list(LAYOUTS))
def everyone(request):
    """The topology as each rank sees it."""
    hosts = tuple(request.param)
    return [Topology(rank, hosts) for rank in range(len(hosts))]


def test_local_ranks_are_those_of_the_same_host(everyone):
    for one in everyone:
        assert one.local_ranks == [other.rank for other in everyone if other.hosts[other.rank] == one.hosts[one.rank]]
        assert one.local_ranks[one.local_rank] == one.rank
        assert one.local_size == len(one.local_ranks)


def test_cross_ranks_have_the_same_local_rank_elsewhere(everyone):
    for one in everyone:
        assert one.cross_ranks == [other.rank for other in everyone if other.local_rank == one.local_rank]
        assert one.cross_ranks[one.cross_rank] == one.rank
        assert one.cross_size == len(one.cross_ranks)


def test_every_rank_counts_the_same(everyone):
    assert {(one.size, one.n_hosts, one.is_homogeneous) for one in everyone} == {
        (len(everyone), len(set(everyone[0].hosts)), everyone[0].is_homogeneous)
    }


@pytest.mark.parametrize(
    ("layout", "expected"), [("a", True), ("aabb", True), ("abab", True), ("abb", False), ("aaabccc", False)]
)
def test_homogeneous_means_equally_many_ranks_on_each_host(layout, expected):
    assert Topology(0, tuple(layout)).is_homogeneous is expected


def test_a_subset_counts_its_own_ranks():
    world = Topology(4, tuple("aabbcc"))
    assert world.subset(1, [5, 4, 0]) == Topology(1, ("c", "c", "a"))
    assert world.subset(1, [5, 4, 0]).local_rank == 1


def test_topologies_are_values():
    assert Topology(1, ("a", "b")) == Topology(1, ("a", "b")) != Topology(0, ("a", "b"))


def test_lists_handed_out_do_not_change_the_topology():
    world = Topology(0, ("a", "a"))
    world.local_ranks.clear()
    assert world.local_ranks == [0, 1]
