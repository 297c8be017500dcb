"""A training script as users of Horovod have them. It knows nothing of hvdlite.

horovod_train.py [--workers N] [--fail]
"""

import argparse
import os

import horovod
import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.utils.data.distributed
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.compression import Compressor
from horovod.torch.mpi_ops import Average, Sum


class Points(torch.utils.data.Dataset):
    """y = 3 x0 - 2 x1 + 1."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        x = torch.tensor([i / 12 - 1, (i * 5 % 24) / 12 - 1])
        return x, torch.tensor([3 * x[0] - 2 * x[1] + 1])


class HalfSize(Compressor):
    """A compressor of the user's own."""

    @staticmethod
    def compress(tensor):
        return tensor.to(torch.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def train(args):
    hvd.init()
    torch.manual_seed(hvd.rank())  # different weights; the broadcast makes them equal
    model = nn.Linear(2, 1)
    data = Points()
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    context = "forkserver" if args.workers else None
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, sampler=sampler, num_workers=args.workers, multiprocessing_context=context
    )

    resume_from_epoch = 3 if hvd.rank() == 0 else 0
    resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()
    assert resume_from_epoch == 3

    lr_scaler = hvd.size() if not hvd.nccl_built() else hvd.local_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * lr_scaler, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=HalfSize if args.compress else hvd.Compression.none,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )
    assert isinstance(optimizer, torch.optim.SGD)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_loss = Metric("train_loss")
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            train_loss.update(loss)
        scheduler.step()
        for _ in range(hvd.rank()):  # ranks have different amounts of work left
            hvd.allreduce(torch.ones(1), name="uneven", op=Sum)
        hvd.join()

    try:
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="wrong")
        assert hvd.size() == 1
    except HorovodInternalError:
        assert hvd.size() > 1
    everyone = hvd.allgather_object((hvd.rank(), round(model.weight[0, 0].item(), 6)), name="weights")
    assert [rank for rank, _ in everyone] == list(range(hvd.size()))
    assert len({weight for _, weight in everyone}) == 1
    if args.fail and hvd.rank() == hvd.size() - 1:
        raise ValueError("the script's own mistake")
    assert Average == hvd.Average == 0
    if hvd.rank() == 0:
        print(f"{os.path.basename(__file__)} {horovod.__version__}: {hvd.size()} ranks, loss {train_loss.avg:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compress", action="store_true")
    parser.add_argument("--fail", action="store_true")
    train(parser.parse_args())
