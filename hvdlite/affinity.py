"""Which cores the ranks of a host may use, and what is wrong with that. Pure but for `cores_of_this_thread`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hvdlite.errors import describe_ranks

_UNBOUND = "Start with 'mpirun --bind-to none' (hvdrun does)"


def cores_of_this_thread() -> list[int]:
    """Return the numbers of the cores that the calling thread may use, ascending."""
    return sorted(os.sched_getaffinity(0))


def describe_cores(cores: Sequence[int]) -> str:
    """Return `0-3,7` for ascending numbers.

    >>> describe_cores([0, 1, 2, 3, 7])
    '0-3,7'
    """
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def complaint(cores: Sequence[Sequence[int]], ranks: Sequence[int], n_cores: int, engines: Sequence[int]) -> str:
    """Return what to tell the user about one host, "" when nothing.

    Args:
        cores: that each rank of the host may use, by local rank.
        ranks: their global numbers.
        n_cores: of the host.
        engines: core of the engine's thread by local rank, as the user wants it; empty if nothing is wanted.
    """
    if len(ranks) < 2:
        return ""
    crowded = _crowded(cores, ranks, n_cores)
    if crowded:
        return crowded
    alone = [rank for rank, mine in zip(ranks, cores, strict=True) if len(mine) == 1]
    if alone and n_cores > 1:
        return (
            f"{describe_ranks(alone)} may use 1 of {n_cores} cores each, which the engine and the training share. "
            f"{_UNBOUND}, or leave it so if every core has a rank."
        )
    shared = {core: [ranks[i] for i, one in enumerate(engines[: len(ranks)]) if one == core] for core in engines}
    for core, sharing in shared.items():
        if len(sharing) > 1:
            return f"HVDLITE_THREAD_AFFINITY puts the engines of {describe_ranks(sharing)} on core {core}."
    return ""


def _crowded(cores: Sequence[Sequence[int]], ranks: Sequence[int], n_cores: int) -> str:
    """Say which ranks were bound to the same cores, fewer than they are, while the host has others."""
    together: dict[tuple[int, ...], list[int]] = {}
    for rank, mine in zip(ranks, cores, strict=True):
        together.setdefault(tuple(mine), []).append(rank)
    for mine, sharing in together.items():
        if len(mine) < min(len(sharing), n_cores):
            what = "core" if len(mine) == 1 else "cores"
            return (
                f"{describe_ranks(sharing)} are bound to the same {what} {describe_cores(mine)} "
                f"of {n_cores} and take turns. {_UNBOUND}."
            )
    return ""
