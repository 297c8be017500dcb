"""Trains a small network elastically; the ranks named in the argument (`1,3`) die in the backward pass of epoch 1."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch

import hvdlite.torch as hvd

N_SAMPLES, BATCH, EPOCHS = 48, 2, 3

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
dies = str(hvd.rank()) in sys.argv[1].split(",")
samples = torch.arange(2.0 * N_SAMPLES).reshape(N_SAMPLES, 2).sin()
model = torch.nn.Sequential(torch.nn.Linear(2, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(samples)


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        loader = torch.utils.data.DataLoader(range(N_SAMPLES), batch_size=BATCH, sampler=sampler)
        for i, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = (model(samples[batch]) - samples[batch].sum(1, keepdim=True)).square().mean()
            if dies and state.epoch == 1 and i == 4:  # the last layer is being reduced when the first one comes
                model[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            optimizer.step()
            sampler.record_batch(i, BATCH)
            state.seen = [*state.seen, *((state.epoch, int(n)) for n in hvd.allgather(batch, name="seen"))]
            if i % 3 == 2:
                state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, seen=[])
train(state)
weights = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.parameters())).hexdigest()
everyone = hvd.allgather_object((weights, sorted(state.seen)))
if hvd.rank() == 0:
    exactly = [(epoch, n) for epoch in range(EPOCHS) for n in range(N_SAMPLES)]
    print(f"{len(everyone)} ranks, {len({one[0] for one in everyone})} model", flush=True)
    print("every sample once" if all(one[1] == exactly for one in everyone) else f"seen: {everyone[0][1]}", flush=True)
