"""PyTorch trains, and the ranks named by the arguments are killed in the middle of the fourth backward."""

from __future__ import annotations

import os
import signal
import sys

import torch

import hvdlite.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(6)))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
step = 0


def die(gradient: torch.Tensor) -> None:
    """When three of six layers have handed over their gradients."""
    if step == 3:
        print("dies in backward", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if str(hvd.rank()) in sys.argv[1:]:
    model[2].weight.register_hook(die)
while True:
    optimizer.zero_grad()
    model(torch.ones(8, 300)).sum().backward()
    optimizer.step()
    step += 1
