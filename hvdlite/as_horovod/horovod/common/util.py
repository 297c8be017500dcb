"""Horovod's helpers, as far as other code has use for them."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hvdlite
from hvdlite.lowlevel import resolve_op


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether hvdlite has an adapter for a framework ("torch"), and the framework is installed."""
    return all(importlib.util.find_spec(name) is not None for name in (f"hvdlite.{ext_base_name}", ext_base_name))


def check_extension(ext_name: str, *build_options: Any) -> None:
    """Raise ImportError unless hvdlite has an adapter for the framework ("horovod.torch")."""
    importlib.import_module(ext_name)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether operations run on GPUs."""
    return bool(hvdlite.cuda_built() or hvdlite.rocm_built())


def mpi_built(verbose: bool = False) -> bool:
    """Return `hvdlite.mpi_built()`."""
    return hvdlite.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Return `hvdlite.gloo_built()`."""
    return hvdlite.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Return `hvdlite.nccl_built()`."""
    return hvdlite.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Return `hvdlite.ddl_built()`."""
    return hvdlite.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return `hvdlite.ccl_built()`."""
    return hvdlite.ccl_built()


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741
    """Return `l` in n consecutive parts, of which the first len(l) % n are longer by one."""
    each, more = divmod(len(l), n)
    starts = [i * each + min(i, more) for i in range(n + 1)]
    return [l[start:stop] for start, stop in itertools.pairwise(starts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether `num_rank` is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: Any) -> bool:
    """Return whether `iter(x)` works."""
    return isinstance(x, Iterable)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return the function that makes one operator of `op` and `average`."""
    return resolve_op
