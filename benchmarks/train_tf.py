"""A training step of TensorFlow with hvdlite, against the same step without communication and with peers.

    hvdrun -np 2 python benchmarks/train_tf.py [--turns 10] [--json results.json]
    python benchmarks/train_tf.py --rate 2gbit     # as root: on two hosts with such a link (hosts.py)

Networks: 8 dense layers of 1024 (8.4 million parameters, 34 MB of gradients) on 256 examples per rank, and a small
convolutional one. Each step is one `tf.function`: forward, backward, exchange, SGD. Contenders take turns:

    none        no communication: what is left is the computation
    hvdlite     DistributedGradientTape
    no overlap  the same, but no bucket starts before backward has ended
    mpi         one numpy_function that calls MPI's Allreduce for each gradient, when backward has ended
    mirrored    MultiWorkerMirroredStrategy, TensorFlow's own, with its ring over gRPC
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd

Step = Callable[[], Any]
WARM_UP, COUNTED = 6, 8  # steps of a turn; until the ranks have learned what they repeat, they do not count


def dense() -> tuple[list[tf.Variable], Callable[[], tf.Tensor]]:
    """Weights, and what computes the loss."""
    weights = [tf.Variable(tf.random.stateless_normal((1024, 1024), [1, i]) / 32.0) for i in range(8)]
    x = tf.random.stateless_normal((256, 1024), [2, hvd.rank()])

    def loss() -> tf.Tensor:
        y = x
        for w in weights:
            y = tf.nn.relu(y @ w)
        return tf.reduce_mean(tf.square(y - x))

    return weights, loss


def conv() -> tuple[list[tf.Variable], Callable[[], tf.Tensor]]:
    shapes = [(3, 3, 1, 32), (3, 3, 32, 64), (3, 3, 64, 64), (64, 10)]
    weights = [tf.Variable(tf.random.stateless_normal(s, [1, i]) / 10.0) for i, s in enumerate(shapes)]
    x = tf.random.stateless_normal((64, 28, 28, 1), [2, hvd.rank()])

    def loss() -> tf.Tensor:
        y = x
        for w in weights[:-1]:
            y = tf.nn.relu(tf.nn.conv2d(y, w, 2, "SAME"))
        return tf.reduce_mean(tf.square(tf.reduce_mean(y, [1, 2]) @ weights[-1]))

    return weights, loss


def by_mpi(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """What a user would write without hvdlite."""
    from mpi4py import MPI

    def exchange(*arrays: np.ndarray) -> list[np.ndarray]:
        sums = [np.empty_like(array) for array in arrays]
        for array, total in zip(arrays, sums, strict=True):
            MPI.COMM_WORLD.Allreduce(np.ascontiguousarray(array), total)
            total /= hvd.size()
        return sums

    return tf.numpy_function(exchange, gradients, [g.dtype for g in gradients])


def multi_worker() -> tf.distribute.Strategy:
    """Connect the ranks by what TensorFlow brings; it listens on each."""
    with socket.socket() as free:
        free.bind(("", 0))
        mine = f"{socket.gethostname()}:{free.getsockname()[1]}"
    cluster = {"worker": hvd.allgather_object(mine)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": hvd.rank()}})
    communication = tf.distribute.experimental
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=communication.CommunicationOptions(
            implementation=communication.CommunicationImplementation.RING
        )
    )


def contenders(make: Callable[[], Any], strategy: tf.distribute.Strategy) -> dict[str, Step]:
    """Steps by name, each with weights of its own."""

    def step_of(exchange: Callable[..., Any], run: Callable[..., Any] = lambda step: step()) -> Step:
        weights, loss = make()

        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                value = loss()
            for w, g in zip(weights, exchange(tape, value, weights), strict=True):
                w.assign_sub(1e-4 * tf.ensure_shape(g, w.shape))
            return value

        whole = tf.function(lambda: run(step))
        return lambda: whole().numpy()

    def distributed(tape: Any, value: Any, weights: Any) -> Any:
        return hvd.DistributedGradientTape(tape).gradient(value, weights)

    def afterwards(tape: Any, value: Any, weights: Any) -> Any:
        gradients = tape.gradient(value, weights)
        with tf.control_dependencies(gradients):
            gradients = [tf.identity(g) for g in gradients]
        return hvd.grouped_allreduce(gradients)

    def mpi(tape: Any, value: Any, weights: Any) -> Any:
        return by_mpi(tape.gradient(value, weights))

    def mirrored(tape: Any, value: Any, weights: Any) -> Any:
        mean = tf.distribute.ReduceOp.MEAN
        return tf.distribute.get_replica_context().all_reduce(mean, tape.gradient(value, weights))

    return {
        "none": step_of(lambda tape, value, weights: tape.gradient(value, weights)),
        "hvdlite": step_of(distributed),
        "no overlap": step_of(afterwards),
        "mpi": step_of(mpi),
        "mirrored": step_of(mirrored, strategy.run),
    }


def measure(steps: dict[str, Step], turns: int, warm_up: int, counted: int) -> dict[str, float]:
    """Median milliseconds of a step of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            hvd.barrier()
            for i in range(warm_up + counted):
                begun = time.perf_counter()
                step()
                if i >= warm_up:
                    times[name].append(time.perf_counter() - begun)
    slowest = {name: hvd.allreduce(tf.constant(spent, tf.float64), op=hvd.Max).numpy() for name, spent in times.items()}
    return {name: 1e3 * statistics.median(spent) for name, spent in slowest.items()}


def between_hosts(options: argparse.Namespace) -> int:
    """Run this program on two hosts with one rank each."""
    from hosts import Hosts, missing

    if problem := missing():
        sys.exit(f"train_tf.py: no hosts here: {problem}")
    with Hosts(2) as hosts:
        hosts.shape(options.rate)
        # Where ranks of Open MPI spin, hosts that share cores would starve each other.
        command = hosts.mpirun(sys.executable, [1, 1], env={"OMPI_MCA_mpi_yield_when_idle": "1"})
        more = ["--json", options.json] if options.json else []
        ended = hosts.run([*command, __file__, "--turns", str(options.turns), *more], timeout=600)
    print(ended.stdout, end="")
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
    return ended.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="does it run? Figures mean nothing")
    parser.add_argument("--threads", type=int, default=1, help="of TensorFlow's kernels on each rank")
    parser.add_argument("--rate", help="of a link between two hosts, as tc writes it")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.rate:
        sys.exit(between_hosts(options))
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    hvd.init()
    strategy = multi_worker()
    results = {}
    for name, make in (("dense, 8.4 million", dense), ("conv, 0.06 million", conv)):
        found = results[name] = measure(
            contenders(make, strategy), *((1, 1, 2) if options.quick else (options.turns, WARM_UP, COUNTED))
        )
        if hvd.rank() == 0:
            print(f"{name}, {hvd.size()} ranks")
            for contender, ms in found.items():
                print(f"    {contender:12}{ms:9.2f} ms   {ms / found['none'] - 1:+7.1%}")
            extra, whole = found["hvdlite"] - found["none"], found["no overlap"] - found["none"]
            print(f"    with overlap the exchange adds {extra / whole:.0%} of what it adds without")
    if options.json and hvd.rank() == 0:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
