"""Where this rank computes."""

from __future__ import annotations

import torch

from hvdlite import local_rank


def local_device() -> torch.device:
    """Return the GPU of this rank, or the CPU where there is none. Not collective.

    Of the GPUs that this process sees, the ranks of a host take one each, and more ranks than GPUs share them. A rank
    that sees one only (`srun --gpus-per-task=1`, CUDA_VISIBLE_DEVICES per rank) takes that one.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())
