"""From which rate on does compression pay off? Steps of a perceptron on two hosts, at several rates of the link.

    python benchmarks/compression_links.py [--rates 100mbit 1gbit 10gbit] [--methods none int8]

Needs root, iproute2 and util-linux (hosts.py). A step is zero_grad, forward, backward and step; it has 4.2 million
parameters, 17 MB of gradients. The methods take turns in one job per rate; both hosts share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from typing import Any

# Where ranks of Open MPI spin, hosts that share cores would starve each other.
SHARED_CORES = {"OMPI_MCA_mpi_yield_when_idle": "1"}
METHODS = ("none", "bf16", "int8", "topk(0.01)", "powersgd(2)")
WIDTH, LAYERS, BATCH = 1024, 4, 32
TURNS, IN_A_ROW, WARM_UP = 2, 3, 4


def main() -> None:
    from hosts import Hosts, missing

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="as tc writes them")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the hosts are taken down
    if problem := missing():
        sys.exit(f"compression_links.py: no hosts here: {problem}")
    print(f"| ms per step | {' | '.join(arguments.methods)} |\n|{'---|' * (len(arguments.methods) + 1)}", flush=True)
    with Hosts(2) as hosts:
        for rate in arguments.rates:
            hosts.shape(rate)
            command = hosts.mpirun(sys.executable, [1, 1], env=SHARED_CORES)
            ended = hosts.run([*command, __file__, "--rank", *arguments.methods], timeout=120)
            if ended.returncode:
                sys.exit(f"{rate}: exit status {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
            found = json.loads(ended.stdout.splitlines()[-1])
            print(f"| {rate} | {' | '.join(f'{1e3 * found[name]:.0f}' for name in arguments.methods)} |", flush=True)


def run_as_rank(names: list[str]) -> None:
    """Time the methods in turn; rank 0 prints the median seconds per step of the slowest rank as JSON."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    compressions = {
        "none": hvd.Compression.none, "bf16": hvd.Compression.bf16, "int8": hvd.Compression.int8,
        "topk(0.01)": hvd.Compression.topk(0.01), "powersgd(2)": hvd.Compression.powersgd(2),
    }  # fmt: skip
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(hvd.rank()))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    trained: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        # Names of their own, so that the optimizers' tensors are not each other's.
        named = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
        trained[name] = model, hvd.DistributedOptimizer(sgd, named, compression=compressions[name])
    for turn in range(TURNS):
        for name in names:
            model, optimizer = trained[name]
            for number in range((0 if turn else WARM_UP) + IN_A_ROW + 1):
                hvd.barrier()
                started = time.perf_counter()
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                took = hvd.allreduce(torch.tensor(time.perf_counter() - started), op=hvd.Max).item()
                if number > (0 if turn else WARM_UP):  # the first after another method's is not in step
                    seconds[name].append(took)
    if hvd.rank() == 0:
        print(json.dumps({name: statistics.median(values) for name, values in seconds.items()}), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_as_rank(sys.argv[2:])
    else:
        main()
