"""One collective on one size and dtype: its arrays, how each contender runs it, and whether the result is right.

Bytes S of a case are those of the longer side: of the tensor of allreduce and broadcast, of the result of allgather,
of the input of reducescatter, and of what each rank sends in alltoall.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import hvdlite as hvd
from hvdlite import lowlevel
from hvdlite.bench import peers

Array = NDArray[Any]

COLLECTIVES = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
DTYPES = {
    **{name: np.dtype(name) for name in ("float32", "float64", "float16", "int32", "int64", "uint8")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
NOT_IN_MPI = ("float16", "bfloat16")


def bus_factor(collective: str, ranks: int) -> float:
    """Return bus bandwidth by algorithm bandwidth: the share of S that each link must carry at least."""
    if collective == "broadcast":
        return 1.0
    return (2 if collective == "allreduce" else 1) * (ranks - 1) / ranks


class Case:
    """What all contenders run: each has arrays of its own.

    Args:
        nbytes: S; rounded up to whole elements for each rank.
        tensors: numpy or torch, what hvdlite is given.
        memory: private, or shared: in memory that all ranks of the host see. Collective then.

    Raises:
        ValueError: there is no shared memory, or none for this.
    """

    def __init__(
        self, collective: str, nbytes: int, dtype: str, rank: int, size: int, *, tensors: str, memory: str
    ) -> None:
        self.collective, self.dtype, self.rank, self.size = collective, dtype, rank, size
        self.tensors = tensors
        per_rank = max(1, -(-nbytes // DTYPES[dtype].itemsize // size))
        whole = per_rank * size
        self.nbytes = whole * DTYPES[dtype].itemsize
        source, target = whole, whole
        if collective == "allgather":
            source = per_rank
        elif collective == "reducescatter":
            target = per_rank
        self.given = self._values(rank, source)
        self.expected = self._expected(per_rank)
        self.home = _shared(self.nbytes, collective, tensors) if memory == "shared" else None
        self._lengths = source, target
        self._arrays: dict[str, tuple[Array, Array]] = {}
        self._results: dict[str, Any] = {}

    def contender(self, name: str) -> Callable[[], None]:
        """Return what `name` (hvdlite, mpi, gloo) does in one repetition."""
        source, target = self._lengths
        if name == "hvdlite" and self.home is not None:
            mine = self.home.array[: self.nbytes].view(DTYPES[self.dtype])
        else:
            mine = np.zeros(target, DTYPES[self.dtype])
        in_place = self.collective in ("allreduce", "broadcast")
        self._arrays[name] = (mine if in_place else self._values(self.rank, source), mine)
        return {"hvdlite": self._hvdlite, "mpi": self._mpi, "gloo": self._gloo}[name]()

    @property
    def array(self) -> Array:
        """What hvdlite's contender works on in place."""
        return self._arrays["hvdlite"][1]

    def fill(self, name: str) -> None:
        """Give a contender its values anew: allreduce and broadcast overwrite them."""
        if self.collective in ("allreduce", "broadcast"):
            np.copyto(self._arrays[name][1], self.given)

    def check(self, name: str) -> None:
        """Raise unless the last repetition of a contender has computed the right thing."""
        found = self._results.get(name)
        result = self._arrays[name][1] if found is None else found
        result = result if isinstance(result, np.ndarray) else _as_array(result)
        if not np.array_equal(result.ravel(), self.expected):
            wrong = int(np.argmax(result.ravel() != self.expected))
            raise RuntimeError(
                f"{name}: {self.collective} of {self.nbytes} bytes of {self.dtype} is wrong on rank {self.rank}: "
                f"element {wrong} is {result.ravel()[wrong]!r} instead of {self.expected[wrong]!r}"
            )

    def _values(self, rank: int, length: int) -> Array:
        # Small whole numbers: exact in every dtype, and their sums, too, on up to 40 ranks.
        return ((np.arange(length) % 5) + rank % 3).astype(DTYPES[self.dtype])

    def _expected(self, per_rank: int) -> Array:
        whole, ranks = per_rank * self.size, range(self.size)
        mine = slice(self.rank * per_rank, (self.rank + 1) * per_rank)
        if self.collective == "broadcast":
            return self._values(0, whole)
        if self.collective == "allgather":
            return np.concatenate([self._values(r, per_rank) for r in ranks])
        if self.collective == "alltoall":
            return np.concatenate([self._values(r, whole)[mine] for r in ranks])
        summed: Array = np.sum([(np.arange(whole) % 5) + r % 3 for r in ranks], axis=0).astype(DTYPES[self.dtype])
        return summed[mine] if self.collective == "reducescatter" else summed

    def _hvdlite(self) -> Callable[[], None]:
        source, target = self._arrays["hvdlite"]
        name = f"bench.{self.collective}.{self.dtype}.{self.nbytes}"
        if self.home is not None:
            return self._in_place(target, name)
        api: Any = hvd
        if self.tensors == "torch":
            import hvdlite.torch

            api, source, target = hvdlite.torch, peers.as_tensor(source), peers.as_tensor(target)
        if self.collective == "allreduce":
            return lambda: api.allreduce_(target, name=name, op=api.Sum)
        if self.collective == "broadcast":
            return lambda: api.broadcast_(target, root_rank=0, name=name)
        call = getattr(api, self.collective)
        more = {"op": api.Sum} if self.collective == "reducescatter" else {}

        def run() -> None:
            result = call(source, name=name, **more)
            self._results["hvdlite"] = result[0] if isinstance(result, tuple) else result

        return run

    def _in_place(self, array: Array, name: str) -> Callable[[], None]:
        more: dict[str, Any] = {"home": self.home}
        item = lowlevel.Item(array, array, **more)

        def run() -> None:
            lowlevel.start(lowlevel.Kind.ALLREDUCE, [name], [item], hvd.global_process_set)[0].wait()

        return run

    def _mpi(self) -> Callable[[], None]:
        if self.dtype in NOT_IN_MPI:
            raise ValueError(f"MPI has no {self.dtype}")
        source, target = self._arrays["mpi"]
        return lambda: peers.mpi(self.collective, source, target)

    def _gloo(self) -> Callable[[], None]:
        source, target = map(peers.as_tensor, self._arrays["gloo"])
        return lambda: peers.gloo(self.collective, source, target)


def _shared(nbytes: int, collective: str, tensors: str) -> Any:
    make = getattr(lowlevel, "shared_buffer", None)
    if collective != "allreduce" or tensors != "numpy":
        raise ValueError("--memory shared is for allreduce of NumPy arrays: nothing else is run in place")
    if make is None:
        raise ValueError("--memory shared: this version has no buffers in shared memory")
    home = make(nbytes, hvd.global_process_set)
    if home is None:
        raise ValueError(f"--memory shared: these ranks share no memory, or it has no room for {nbytes} bytes")
    return home


def _as_array(tensor: Any) -> Array:
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        bits: Array = tensor.view(torch.uint16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array
