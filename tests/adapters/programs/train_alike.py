"""Train on every rank, and print the weights' checksum; ends with 1 unless all ranks have the same bits."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

import hvdlite.torch as hvd


def main() -> int:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 36, 64), nn.ReLU(), nn.Linear(64, 5),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), groups=3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    weights = b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()
    everyone = hvd.allgather_object(digest)
    halves = hvd.allreduce(torch.full((100_003,), hvd.rank() + 1, dtype=torch.bfloat16))
    if hvd.rank() == 0:
        print(f"{len(everyone)} ranks, {len(set(everyone))} results, mean of halves {halves.float().mean().item()}")
    return 0 if len(set(everyone)) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
