"""Have all ranks the same? Asked before operations that would wait for ever if they had not."""

from __future__ import annotations

import zlib
from typing import TypeVar

import torch

from hvdlite import ProcessSet, allgather_object

from .autograd import allgather

_T = TypeVar("_T")


def everyones_unless_equal(mine: _T, name: str, process_set: ProcessSet) -> dict[int, _T] | None:
    """Return None if all ranks of the set have the same, else what each has, by global rank. Collective.

    All ranks get the same answer. Where they agree, eight bytes of each travel.

    Args:
        mine: what can be pickled, and has a repr that tells it from others.
        name: under which it is asked.
    """
    crc = zlib.crc32(repr(mine).encode())
    if len(set(allgather(torch.tensor([crc]), name, process_set).tolist())) == 1:
        return None
    everyone = allgather_object(mine, f"{name}.all", process_set)
    return dict(zip(process_set.ranks or (), everyone, strict=True))
