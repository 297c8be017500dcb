"""A sampler that knows which samples of the epoch are done, whatever the number of ranks was then."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from hvdlite import rank, size


class ElasticSampler(Sampler[int]):
    """Deals out what is left of an epoch among the ranks there are. Not collective.

        for i, batch in enumerate(loader):
            ...
            sampler.record_batch(i, batch_size)
        sampler.set_epoch(epoch + 1)    # at the end of an epoch, not at its beginning

    Every rank gets equally many samples: the first ones are repeated as often as that takes. When the number of
    ranks has changed, or after `load_state_dict`, what was recorded is not dealt out again.

    Args:
        dataset: has a length, the same on all ranks.
        shuffle, seed: equal on all ranks.

    Attributes:
        epoch: the number given to `set_epoch`.
        processed_num: samples of this epoch that all ranks together have recorded.
        remaining_indices: the others, in their order.
        num_replicas, rank: of all ranks, at the last reset.
        num_samples: how many each rank gets.
        total_size: how many all ranks get.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, of which nothing is done."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has done a batch of `batch_size` samples. What is being iterated over stays."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Deal out what is not done yet among the ranks there are now."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict()` of any rank, and any number of ranks, returned."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        remaining = self.remaining_indices
        return (remaining[i % len(remaining)] for i in range(self.rank, self.total_size, self.num_replicas))

    def __len__(self) -> int:
        return self.num_samples
