"""One contract for every backend: on ranks as threads, and under mpirun with `-p hvdlite.testing.lockstep`.

Every rank can compute what it must get, so bodies check for themselves and only bits are compared across ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.collectives.adasum import adasum_tree
from hvdlite.collectives.base import Array, Backend
from hvdlite.collectives.reference import reduce_in_rank_order
from hvdlite.collectives.select import make_backends
from hvdlite.comm.base import Communicator
from hvdlite.dtypes import BFLOAT16, SUPPORTED, ReduceOp, accumulator, is_floating, is_integer, name_of
from hvdlite.errors import UnsupportedDtypeError
from hvdlite.kernels import Finish, Kernels
from hvdlite.testing.ranks import run_ranks

SIZES = [1, 2, 3, 4, 7]
BACKENDS = ["local", "reference", "ring", "tree", "shared_memory", "direct", "mpi_native"]
# Who sits where, for ranks that pretend to be on several hosts: equally many on each, in blocks and dealt out; one
# host with more than the others; leaders beside a rank that is alone.
HOSTS = {3: ["aab", "aba"], 4: ["aabb", "abab", "aaab"], 7: ["aaabbbc", "abcabca", "aabbccc"]}
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
LAYOUTS = [[], [0], [1], [5], [1000], [3, 0, 700, 1, 0, 4001]]
SMALL = 4096  # bytes of a piece and a chunk: some hundred elements already take several rounds
IN_RANK_ORDER = {
    "local",
    "reference",
    "shared_memory",
    "direct",
}  # whose bits are those of a sum from rank 0 to the last

Play = Callable[[Callable[[Communicator], None]], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Pair each backend with the sizes it has: threads play any size, under mpirun the size is given."""
    if "name" in metafunc.fixturenames:
        sizes = [_mpi_world().size] if _in_lockstep(metafunc.config) else SIZES
        names = [name for name in BACKENDS if name != "mpi_native" or _in_lockstep(metafunc.config)]
        pairs = [(name, size) for size in sizes for name in names if size == 1 or name != "local"]
        pairs += [(f"hierarchical_{hosts}", size) for size in sizes for hosts in HOSTS.get(size, [])]
        metafunc.parametrize("name,size", pairs)


@pytest.fixture
def play(request: pytest.FixtureRequest, name: str, size: int) -> Play:
    """Run a body on all ranks: threads, or the processes of mpirun. The name of a backend may end with the hosts."""
    hosts = name.partition("_")[2] if name.startswith("hierarchical") else None
    if _in_lockstep(request.config):
        return lambda body: body(_mpi_world(hosts))
    return lambda body: run_ranks(size, body, hosts, timeout=90) and None


def _in_lockstep(config: pytest.Config) -> bool:
    return bool(config.pluginmanager.has_plugin("hvdlite.testing.lockstep"))


def _mpi_world(hosts: str | None = None) -> Communicator:
    from hvdlite.comm.mpi import start, world

    return world(host=hosts[start()[0]] if hosts else None)


class backend:
    """`with backend(name, comm) as b:` a backend with small pieces; `with` closes it."""

    def __init__(self, name: str, comm: Communicator, nbytes: int = SMALL) -> None:
        self.name, self.comm, self.nbytes = name, comm, nbytes

    def __enter__(self) -> Backend:
        name = "shared_memory" if self.name == "direct" else self.name
        if name.startswith("hierarchical"):
            name = "hierarchical"
        if self.comm.size == 1 and self.name != "local":
            return _alone(self.name, self.comm, self.nbytes)
        self.all = make_backends(
            self.comm,
            Kernels(128),
            shared_memory=name in ("shared_memory", "hierarchical"),
            hierarchical=name == "hierarchical",
            piece_bytes=self.nbytes,
            chunk_bytes=self.nbytes // 8,
            small_bytes=self.nbytes // 2,
            peer_memory=self.name == "direct",
            direct_bytes=1,
        )
        return self.all[name]

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None and hasattr(self, "all"):
            self.all.close()


def _alone(name: str, comm: Communicator, nbytes: int) -> Backend:
    """Return a backend of one rank, which `make_backends` would replace by `local`."""
    from hvdlite.collectives import mpi_native, reference, ring, shared_memory, tree

    kernels = Kernels(128)
    if name in ("shared_memory", "direct"):
        segment = comm.shared_segment(shared_memory.segment_bytes(nbytes))
        assert segment is not None
        peers = comm.peer_memory() if name == "direct" else None
        return shared_memory.SharedMemoryBackend(comm, kernels, segment, nbytes, peers, 1)
    if name == "mpi_native":
        return mpi_native.MpiNativeBackend(comm, kernels)
    kinds: dict[str, Any] = {
        "ring": ring.RingBackend,
        "tree": tree.TreeBackend,
        "reference": reference.ReferenceBackend,
    }
    return kinds[name](comm, kernels)  # type: ignore[no-any-return]


def values(rank: int, layout: Sequence[int], dtype: np.dtype[Any]) -> list[Array]:
    """Return tensors in which no two ranks or neighbours have equal elements, with sums that need rounding."""
    made = []
    for number, length in enumerate(layout):
        steps = np.arange(length) * 7 + 13 * rank + 5 * number + 1
        if dtype.kind == "b":
            made.append(steps % 3 == 0)
        elif is_integer(dtype):
            made.append((steps % 120).astype(dtype))
        elif dtype.kind == "c":
            made.append((np.sin(steps) + 1j * np.cos(3 * steps)).astype(dtype))
        else:
            made.append((np.sin(steps) * 1.5).astype(dtype))
    return made


def expected(
    size: int, layout: Sequence[int], dtype: np.dtype[Any], op: ReduceOp, pre: float = 1.0, finish: Finish = Finish()
) -> list[Array]:
    per_rank = [values(rank, layout, dtype) for rank in range(size)]
    return [reduce_in_rank_order(tensors, op, pre, finish) for tensors in zip(*per_rank, strict=True)]


def check(found: Array, wanted: Array, exact: bool) -> None:
    assert found.dtype == wanted.dtype
    if exact:
        assert found.tobytes() == wanted.tobytes()
        return
    wide: Any = np.complex128 if wanted.dtype.kind == "c" else np.float64
    tolerance = {"float16": 2e-3, "bfloat16": 1e-2, "float64": 1e-13, "complex128": 1e-13}.get(
        name_of(wanted.dtype), 1e-5
    )
    np.testing.assert_allclose(found.astype(wide), wanted.astype(wide), rtol=tolerance, atol=tolerance)


def is_exact(name: str, dtype: np.dtype[Any], op: ReduceOp) -> bool:
    return name in IN_RANK_ORDER or not (is_floating(dtype) or dtype.kind == "c") or op in (ReduceOp.MIN, ReduceOp.MAX)


def same_on_all_ranks(comm: Communicator, arrays: Sequence[Array]) -> None:
    said = comm.allgather_bytes(b"".join(array.tobytes() for array in arrays))
    assert len(set(said)) == 1


def meaningful() -> Iterator[tuple[np.dtype[Any], ReduceOp]]:
    """Yield the dtypes with the operations that mean something on them."""
    for dtype in SUPPORTED.values():
        for op in OPS:
            if not (dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX)) and (dtype.kind, op) != ("b", OPS[0]):
                yield dtype, op


def test_allreduce_reduces_every_dtype_with_every_operation(name: str, size: int, play: Play) -> None:
    layout = [3, 0, 257]

    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for dtype, op in meaningful():
                sources = values(comm.rank, layout, dtype)
                targets = [np.empty_like(source) for source in sources]
                b.allreduce(sources, targets, op)
                for found, wanted in zip(targets, expected(comm.size, layout, dtype, op), strict=True):
                    check(found, wanted, is_exact(name, dtype, op))
                same_on_all_ranks(comm, targets)
                for kept, original in zip(sources, values(comm.rank, layout, dtype), strict=True):
                    assert kept.tobytes() == original.tobytes(), "a source was changed"

    play(body)


@pytest.mark.parametrize("dtype", [SUPPORTED["float32"], SUPPORTED["int64"], BFLOAT16], ids=name_of)
def test_allreduce_takes_any_lengths_in_and_out_of_place(
    name: str, size: int, play: Play, dtype: np.dtype[Any]
) -> None:
    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for layout in LAYOUTS:
                wanted = expected(comm.size, layout, dtype, ReduceOp.SUM)
                apart, together = values(comm.rank, layout, dtype), values(comm.rank, layout, dtype)
                targets = [np.empty_like(source) for source in apart]
                b.allreduce(apart, targets, ReduceOp.SUM)
                b.allreduce(together, together, ReduceOp.SUM)
                for one, other, right in zip(targets, together, wanted, strict=True):
                    check(one, right, is_exact(name, dtype, ReduceOp.SUM))
                    assert one.tobytes() == other.tobytes()

    play(body)


@pytest.mark.parametrize("finish", [Finish(), Finish(0.37), Finish(1.0, 3)], ids=["plain", "factor", "divisor"])
@pytest.mark.parametrize("prescale", [1.0, 0.3])
def test_scaling_is_the_same_everywhere(name: str, size: int, play: Play, prescale: float, finish: Finish) -> None:
    names = (
        ["int8", "uint64", "int32"] if finish.divisor != 1 else ["int32", "float16", "bfloat16", "float32", "complex64"]
    )
    layout = [5, 0, 301]

    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for dtype in map(SUPPORTED.__getitem__, names):
                sources = values(comm.rank, layout, dtype)
                targets = [np.empty_like(source) for source in sources]
                b.allreduce(sources, targets, ReduceOp.SUM, prescale, finish)
                wanted = expected(comm.size, layout, dtype, ReduceOp.SUM, prescale, finish)
                for found, right in zip(targets, wanted, strict=True):
                    check(found, right, is_exact(name, dtype, ReduceOp.SUM))
                same_on_all_ranks(comm, targets)

    play(body)


@pytest.mark.parametrize("dtype", [SUPPORTED["float32"], SUPPORTED["float16"], SUPPORTED["int32"]], ids=name_of)
def test_reducescatter_leaves_each_rank_its_piece(name: str, size: int, play: Play, dtype: np.dtype[Any]) -> None:
    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for layout in LAYOUTS:
                counts = [[length // size + (r < length % size) for r in range(size)] for length in layout]
                if layout and layout[0] == 1000:
                    counts = [[1000] + [0] * (size - 1)]  # everything for one rank
                starts = [sum(count[: comm.rank]) for count in counts]
                sources = values(comm.rank, layout, dtype)
                targets = [np.empty(count[comm.rank], dtype) for count in counts]
                b.reducescatter(sources, counts, targets, ReduceOp.SUM, 0.5, Finish(1.5))
                wanted = expected(size, layout, dtype, ReduceOp.SUM, 0.5, Finish(1.5))
                for found, right, start in zip(targets, wanted, starts, strict=True):
                    check(found, right[start : start + found.size], is_exact(name, dtype, ReduceOp.SUM))

    play(body)


def test_allgather_concatenates_ragged_tensors_of_mixed_dtypes(name: str, size: int, play: Play) -> None:
    dtypes = [SUPPORTED["float64"], SUPPORTED["bool"], BFLOAT16, SUPPORTED["complex128"]]

    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for scale in (0, 1, 5, 333):
                counts = [[scale * (r + i) % 1001 for r in range(size)] for i in range(len(dtypes))]
                for used in (dtypes, dtypes[:1]):

                    def tensors(rank: int, used: Any = used, counts: Any = counts) -> list[Array]:
                        return [
                            values(rank, [count[rank]], dtype)[0] for count, dtype in zip(counts, used, strict=False)
                        ]

                    targets = [np.empty(sum(count), dtype) for count, dtype in zip(counts, used, strict=False)]
                    b.allgather(tensors(comm.rank), counts[: len(used)], targets)
                    for i, found in enumerate(targets):
                        check(found, np.concatenate([tensors(r)[i] for r in range(size)]), exact=True)

    play(body)


def test_broadcast_from_every_root(name: str, size: int, play: Play) -> None:
    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for dtype in (SUPPORTED["bool"], SUPPORTED["int16"], BFLOAT16, SUPPORTED["complex128"]):
                for length in (0, 1, 5, 3001):
                    for root in range(size):
                        (array,) = values(comm.rank, [length], dtype)
                        b.broadcast(array, root)
                        check(array, values(root, [length], dtype)[0], exact=True)

    play(body)


def test_alltoall_delivers_every_pair(name: str, size: int, play: Play) -> None:
    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for scale in (0, 1, 5, 777):
                # From q to r: some pairs exchange nothing, and the tail of each source stays.
                lengths = [[scale * ((q + 2 * r) % 3) for r in range(size)] for q in range(size)]
                sources = [values(q, [sum(lengths[q]) + 3], SUPPORTED["float32"])[0] for q in range(size)]
                receive = [lengths[q][comm.rank] for q in range(size)]
                target = np.empty(sum(receive), np.float32)
                b.alltoall(sources[comm.rank], lengths[comm.rank], target, receive)
                starts = [sum(lengths[q][: comm.rank]) for q in range(size)]
                parts = [
                    sources[q][start : start + n] for q, (start, n) in enumerate(zip(starts, receive, strict=True))
                ]
                check(target, np.concatenate(parts), exact=True)

    play(body)


@pytest.mark.parametrize("dtype", [d for d in SUPPORTED.values() if is_floating(d)], ids=name_of)
def test_adasum_follows_its_rule_for_each_tensor(name: str, size: int, play: Play, dtype: np.dtype[Any]) -> None:
    layout = [3, 0, 1, 555]

    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            sources = values(comm.rank, layout, dtype)
            targets = [np.empty_like(source) for source in sources]
            b.allreduce(sources, targets, ReduceOp.ADASUM)
            per_rank = [values(rank, layout, dtype) for rank in range(size)]
            for i, found in enumerate(targets):
                check(found, adasum_tree([t[i].astype(accumulator(dtype)) for t in per_rank]).astype(dtype), exact=True)
            same_on_all_ranks(comm, targets)

    play(body)


def test_nan_on_one_rank_reaches_all(name: str, size: int, play: Play) -> None:
    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for dtype in (SUPPORTED["float32"], SUPPORTED["float16"], BFLOAT16):
                for op in OPS:
                    array = np.ones(100, dtype)
                    if comm.rank == size - 1:
                        array[37] = np.nan
                    b.allreduce([array], [array], op)
                    assert np.flatnonzero(np.isnan(array)).tolist() == [37]

    play(body)


def test_average_of_large_halves_does_not_overflow(name: str, size: int, play: Play) -> None:
    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for dtype, large in ((SUPPORTED["float16"], 60000), (BFLOAT16, 3e38 / size)):
                source = np.full(1000, large, dtype)
                found = np.empty_like(source)
                b.allreduce([source], [found], ReduceOp.SUM, 1.0, Finish(1 / size))
                assert np.isfinite(found.astype(np.float32)).all()
                check(found, source, exact=size in (1, 2, 4))

    play(body)


def test_large_odd_lengths_with_the_default_pieces(name: str, size: int, play: Play) -> None:
    def body(comm: Communicator) -> None:
        with backend(name, comm, nbytes=1 << 20) as b:
            for dtype in (SUPPORTED["float32"], SUPPORTED["float16"]):
                layout = [300_001, 17, 700_003]
                arrays = values(comm.rank, layout, dtype)
                b.allreduce(arrays, arrays, ReduceOp.SUM)
                for found, wanted in zip(arrays, expected(size, layout, dtype, ReduceOp.SUM), strict=True):
                    check(found, wanted, is_exact(name, dtype, ReduceOp.SUM))
                same_on_all_ranks(comm, arrays)

    play(body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [SUPPORTED["float32"], SUPPORTED["float16"]], ids=name_of)
def test_fusion_layout_does_not_change_bits_in_shared_memory(size: int, dtype: np.dtype[Any]) -> None:
    # 999 elements are a small message, so small and large ways meet here too.
    layouts = [[9999], [1, 9998], [5000, 4999], [999] * 10 + [9]]

    def body(comm: Communicator) -> None:
        bits = set()
        for way, nbytes in (("shared_memory", SMALL), ("shared_memory", 3 * SMALL + 64), ("direct", SMALL)):
            with backend(way, comm, nbytes) as b:
                for layout in layouts:
                    (whole,) = values(comm.rank, [9999], dtype)
                    ends = np.cumsum(layout)
                    tensors = [whole[end - n : end] for end, n in zip(ends, layout, strict=True)]
                    b.allreduce(tensors, tensors, ReduceOp.SUM, 1.0, Finish(1 / size))
                    bits.add(whole.tobytes())
                    (whole,) = values(comm.rank, [9999], dtype)
                    for end, n in zip(ends, layout, strict=True):
                        b.allreduce([whole[end - n : end]], [whole[end - n : end]], ReduceOp.SUM, 1.0, Finish(1 / size))
                    bits.add(whole.tobytes())
        assert len(bits) == 1

    run_ranks(size, body, timeout=90)


def test_mixed_calls_in_a_row_do_not_disturb_each_other(name: str, size: int, play: Play) -> None:
    # Blocks and scratch are reused by the next call while a slow rank may still read them.
    def body(comm: Communicator) -> None:
        with backend(name, comm) as b:
            for turn in range(40):
                array = np.full(1 + 37 * turn, comm.rank + turn, np.int64)
                b.allreduce([array], [array], ReduceOp.SUM)
                assert (array == size * turn + size * (size - 1) // 2).all()
                root = turn % size
                array[:] = comm.rank
                b.broadcast(array, root)
                assert (array == root).all()
                target = np.empty(size * 3, np.int64)
                b.allgather([np.full(3, comm.rank + turn)], [[3] * size], [target])
                assert target.tolist() == [r + turn for r in range(size) for _ in range(3)]
                b.alltoall(target, [3] * size, target.copy(), [3] * size)

    play(body)


def test_what_has_no_meaning_is_refused_before_it_gets_here() -> None:
    from hvdlite.dtypes import check_reducible

    refused = [(d, op) for d in SUPPORTED.values() for op in OPS if (d, op) not in set(meaningful())]
    assert refused
    for dtype, op in refused:
        with pytest.raises(UnsupportedDtypeError):
            check_reducible(dtype, op)
