"""Train from a DataLoader whose workers start after init(), and print what came of it.

The argument says how: fork or forkserver.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd

EPOCHS = 2


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), os.getpid()


def main(method: str) -> int:
    hvd.init()
    multiprocessing.set_forkserver_preload(["hvdlite.torch"])  # else each worker imports torch anew, for seconds
    torch.set_num_threads(1)
    model = nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    data = Numbers()
    sampler: DistributedSampler[object] = DistributedSampler(data, hvd.size(), hvd.rank())
    loader = DataLoader(data, 4, sampler=sampler, num_workers=2, multiprocessing_context=method)
    workers, seen = set(), 0
    for epoch in range(EPOCHS):  # workers end and start anew in each
        sampler.set_epoch(epoch)
        for x, pids in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            seen += len(x)
            workers.update(pids.tolist())
    weights = hvd.allgather(torch.cat([p.detach().reshape(1, -1) for p in model.parameters()], dim=1))
    total = int(hvd.allreduce(torch.tensor(seen), op=hvd.Sum))
    alike = bool((weights == weights[0]).all()) and bool(weights.isfinite().all())
    if hvd.rank() == 0:
        print(f"{total} items, {len(workers)} workers, alike: {alike}")
    hvd.barrier()
    return 0 if alike and os.getpid() not in workers else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
