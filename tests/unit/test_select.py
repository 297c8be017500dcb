"""Which backend, and the sentence that says why."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlite.collectives.hierarchical import lanes
from hvdlite.collectives.select import BACKENDS, Choice, choose, make_backends
from hvdlite.dtypes import SUPPORTED, ReduceOp
from hvdlite.errors import ConfigError
from hvdlite.kernels import Kernels
from hvdlite.testing.ranks import run_ranks
from hvdlite.topology import Topology

ALONE = Topology(0, ("a",))
ONE_HOST = Topology(0, ("a", "a", "a"))
TWO_HOSTS = Topology(1, ("a", "a", "b"))


def chosen(topology: Topology, nbytes: int = 1000, **more: Any) -> Choice:
    given = {"shared_memory_available": topology.n_hosts == 1, "native_available": False, **more}
    return choose("allreduce", nbytes, SUPPORTED["float32"], ReduceOp.SUM, topology, **given)


def test_one_rank_needs_nobody() -> None:
    assert chosen(ALONE).backend == "local"
    assert chosen(ALONE, forced="ring").backend == "local"


def test_one_host_shares_memory_at_any_size() -> None:
    assert {chosen(ONE_HOST, nbytes).backend for nbytes in (0, 1, 10**9)} == {"shared_memory"}


@pytest.mark.parametrize(("nbytes", "backend"), [(0, "tree"), (100, "tree"), (101, "ring"), (10**9, "ring")])
def test_threshold_divides_tree_and_ring_between_hosts(nbytes: int, backend: str) -> None:
    assert chosen(TWO_HOSTS, nbytes, small_bytes=100).backend == backend


@pytest.mark.parametrize(
    ("nbytes", "backend"), [(4, "tree"), (4096, "tree"), (4100, "hierarchical"), (0, "hierarchical")]
)
def test_what_is_tiny_takes_one_trip_even_where_hosts_have_several_ranks(nbytes: int, backend: str) -> None:
    assert chosen(TWO_HOSTS, nbytes, hierarchical_available=True).backend == backend
    # Told that nothing is small, all of it takes the way of large ones.
    assert chosen(TWO_HOSTS, nbytes, hierarchical_available=True, small_bytes=-1).backend == "hierarchical"


def test_one_host_without_shared_memory_sends_messages() -> None:
    choice = chosen(ONE_HOST, 10**6, shared_memory_available=False)
    assert choice.backend == "ring"
    assert "without shared memory" in choice.reason


def test_reason_names_operation_bytes_dtype_and_place() -> None:
    reason = chosen(TWO_HOSTS, 4096, small_bytes=100).reason
    assert "allreduce of 4096 bytes of float32 (SUM)" in reason
    assert "3 ranks on 2 hosts" in reason


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "local"])
def test_user_decides(name: str) -> None:
    choice = chosen(ONE_HOST, forced=name, native_available=True, hierarchical_available=True)
    assert choice == Choice(name, f"{name} was asked for")


def test_auto_is_no_choice_of_the_user() -> None:
    assert chosen(ONE_HOST, forced="auto") == chosen(ONE_HOST)


@pytest.mark.parametrize("kind", ["allreduce", "broadcast"])
@pytest.mark.parametrize("nbytes", [0, 10**9])
def test_hosts_with_several_ranks_each_combine_them_first(kind: str, nbytes: int) -> None:
    given = {"shared_memory_available": False, "native_available": False, "hierarchical_available": True}
    choice = choose(kind, nbytes, SUPPORTED["float32"], None, TWO_HOSTS, **given)  # type: ignore[arg-type]
    assert choice.backend == "hierarchical"
    assert "3 ranks on 2 hosts" in choice.reason


@pytest.mark.parametrize(
    ("kind", "op"),
    [("allgather", None), ("alltoall", None), ("reducescatter", ReduceOp.SUM), ("allreduce", ReduceOp.ADASUM)],
)
def test_what_gains_nothing_from_hierarchy_stays_flat(kind: str, op: ReduceOp | None) -> None:
    given = {"shared_memory_available": False, "native_available": False, "hierarchical_available": True}
    choice = choose(kind, 10**6, SUPPORTED["float32"], op, TWO_HOSTS, **given)  # type: ignore[arg-type]
    assert choice.backend == "ring"


@pytest.mark.parametrize("name", ["shared_memory", "mpi_native", "hierarchical"])
def test_what_is_not_there_becomes_the_ring_and_says_so(name: str) -> None:
    choice = chosen(TWO_HOSTS, forced=name)
    assert choice.backend == "ring"
    assert f"{name} was asked for" in choice.reason


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'rnig' is unknown.*shared_memory, hierarchical, tree, ring"):
        chosen(ONE_HOST, forced="rnig")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_backends_are_built_once_and_as_their_communicator_allows(size: int) -> None:
    def body(comm: Any) -> None:
        backends = make_backends(comm, Kernels(), piece_bytes=4096)
        assert not backends.native_available
        assert backends.shared_memory_available == (size > 1)
        for name in backends:
            assert backends[name].name == name
            assert backends[name] is backends[name]
        assert ("local" in backends) == (size == 1)
        backends.close()

    run_ranks(size, body)


@pytest.mark.parametrize(
    ("hosts", "wanted", "available"),
    [("aab", True, True), ("aab", False, False), ("abc", True, False), ("aaa", True, False)],
)
def test_hierarchical_needs_several_hosts_and_several_ranks_on_one(hosts: str, wanted: bool, available: bool) -> None:
    def body(comm: Any) -> None:
        backends = make_backends(comm, Kernels(), hierarchical=wanted)
        assert backends.hierarchical_available == available
        backends.close()

    run_ranks(3, body, hosts=hosts)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aabb", ((0, 2), (1, 3))),
        ("abab", ((0, 1), (2, 3))),
        ("aaab", ((0, 3),)),
        ("baab", ((0, 1), (3, 2))),
    ],
)
def test_a_lane_has_one_rank_of_each_host_in_the_same_order(hosts: str, expected: tuple[tuple[int, ...], ...]) -> None:
    assert lanes(Topology(0, tuple(hosts))) == expected


def test_shared_memory_is_left_out_between_hosts_and_when_unwanted() -> None:
    def body(comm: Any) -> None:
        assert not make_backends(comm, Kernels(), shared_memory=comm.topology.n_hosts > 1).shared_memory_available

    run_ranks(2, body, hosts=["a", "b"])
    run_ranks(2, body)
