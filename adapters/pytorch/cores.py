"""Are there cores for an engine's thread besides those that train?"""

from __future__ import annotations

import os

import torch

from hvdlite import local_size, size


def has_spare_cores() -> bool:
    """Return whether reducing gradients while backward() runs would take no core from it.

    Ranks on several hosts also wait for the network, which takes no core: they always have something to gain.
    """
    if size() > local_size():
        return True
    mine, all_of_them = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    each = mine if mine < all_of_them else mine / local_size()  # a rank that is bound has its cores for itself
    return each > torch.get_num_threads()
