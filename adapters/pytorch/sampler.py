"""Which samples of a data set are this rank's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import distributed

import hvdlite


class DistributedSampler(distributed.DistributedSampler[Any]):
    """torch's sampler of this name, with this rank's place among all ranks as the default. Not collective.

    Every rank gets equally many samples: by repeating some, or with `drop_last` by leaving some out. Call
    `set_epoch(epoch)` before each epoch; else all epochs have one order.

    Args:
        dataset: has a length, the same on all ranks.
        num_replicas, rank: default to `hvd.size()` and `hvd.rank()`; `process_set.size()` and `process_set.rank()`
            are for training in a process set.
        shuffle, seed, drop_last: equal on all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        num_replicas = hvdlite.size() if num_replicas is None else num_replicas
        rank = hvdlite.rank() if rank is None else rank
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
