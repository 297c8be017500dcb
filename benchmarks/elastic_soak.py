"""Train while ranks are killed and slots come and go, and check that nothing was lost: no sample, no bit, no accuracy.

    python benchmarks/elastic_soak.py [--events 30] [--seed 1]

hvdrun trains the network of examples/pytorch_digits.py on up to 4 ranks of this machine. Each event kills one or two
ranks with SIGKILL at a random moment, or changes how many slots the discovery script finds. It ends when all events
have happened and the training is done. Exit code 1 if anything was not as it should be.

What is checked: every sample of every epoch was trained on once in the history that counts (what was rolled back does
not), but for those that even out the ranks at the end of an epoch or at a change, fewer than ranks each time; after
each start all ranks have equal bits; no more steps were repeated than lie between two commits; the accuracy is that of
an undisturbed run within 1.5 points; the job took less than 15 s to go on after each event.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMIT = 3  # steps between commits
MOST = 4  # ranks
PATIENCE = 60.0  # seconds: when an event has not been answered by then, something hangs


# What each rank does.


def train_here(folder: Path, epochs: int) -> None:
    """Train, and write down what happens. Ends when the driver has no more events, and `epochs` are over."""
    sys.path.insert(0, str(EXAMPLES))
    import numpy as np
    import torch
    from pytorch_digits import evaluate, load_data, make_model
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    import hvdlite.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())  # ranks that are not made equal would be seen
    torch.set_num_threads(1)
    training, validation = load_data()
    n = len(training)
    numbered = TensorDataset(*training.tensors, torch.arange(n))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.001), model.named_parameters())
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=hvd.elastic.ElasticSampler(numbered, seed=1),
        epoch=0, step=0, seen=np.zeros(n, np.int64), deals=[hvd.size()], history=[],
    )  # fmt: skip
    (folder / "pids" / str(hvd.rank())).write_text(str(os.getpid()))

    def note(**what: Any) -> None:
        if hvd.rank() == 0:
            with open(folder / "log", "a") as file:
                file.write(json.dumps({"at": time.time(), **what}) + "\n")

    @hvd.elastic.run
    def train(state: Any) -> None:
        weights = b"".join(value.detach().numpy().tobytes() for value in state.model.state_dict().values())
        moments = b"".join(
            value.numpy().tobytes() for s in state.optimizer.state_dict()["state"].values() for value in s.values()
        )
        sums = set(hvd.allgather_object(hashlib.sha256(weights + moments).hexdigest()))
        note(begins=state.step, ranks=hvd.size(), different_states=len(sums))
        if state.step:
            state.deals.append(hvd.size())  # what is left is dealt out once more
        batches = DataLoader(numbered, batch_size=8, sampler=state.sampler)
        while state.epoch < epochs or not (folder / "enough").exists():
            for i, (images, labels, indices) in enumerate(batches):
                state.optimizer.zero_grad()
                cross_entropy(state.model(images), labels).backward()
                state.optimizer.step()
                state.step += 1
                np.add.at(state.seen, hvd.allgather(indices).numpy(), 1)
                state.sampler.record_batch(i, len(labels))
                note(step=state.step)
                if state.step % COMMIT == 0:
                    state.commit()
            state.history.append({"seen": state.seen, "deals": state.deals})
            state.seen, state.deals = np.zeros(n, np.int64), [hvd.size()]
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    accuracy = evaluate(model, validation)
    if hvd.rank() == 0:
        seen = [
            {"never": int((e["seen"] == 0).sum()), "more": int(e["seen"].sum()) - n, "deals": e["deals"]}
            for e in state.history
        ]
        (folder / "result").write_text(json.dumps({"accuracy": accuracy, "epochs": seen}))


# What disturbs them, and looks at what came of it.


class Job:
    """A training under hvdrun, with what it writes down."""

    def __init__(self, folder: Path, epochs: int, slots: int) -> None:
        self.folder = folder
        (folder / "pids").mkdir(parents=True)
        self.offer(slots)
        discover = folder / "discover"
        discover.write_text(f"#!/bin/sh\ncat {folder}/slots\n")
        discover.chmod(0o755)
        self._output = open(folder / "output", "wb")  # noqa: SIM115 - as long as the job
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "hvdlite.launch", "-np", str(slots), "--min-np", "1", "--max-np", str(MOST),
                "--host-discovery-script", discover, "--elastic-timeout", "60",
                sys.executable, __file__, "--rank-of", folder, "--epochs", str(epochs),
            ],
            stdout=self._output, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
        )  # fmt: skip

    def offer(self, slots: int) -> None:
        """Let the discovery script find so many slots here."""
        (self.folder / "slots.new").write_text(f"localhost:{slots}\n")
        os.replace(self.folder / "slots.new", self.folder / "slots")

    def log(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "log").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def kill(self, rank: int) -> bool:
        """Kill a rank, if it lives."""
        try:
            pid = int((self.folder / "pids" / str(rank)).read_text())
            if str(self.folder).encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                return False  # the number belongs to another process now
            os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            return False
        return True

    def wait_for(self, what: Any, patience: float = PATIENCE) -> bool:
        """Wait until `what(log)` holds; False if it does not in time, or the job ends before."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if what(self.log()):
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.1)
        return False

    def finish(self, patience: float) -> dict[str, Any]:
        """Let it come to its end; returns what it found, {} if it did not."""
        (self.folder / "enough").touch()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(30)
        self._output.close()
        result = self.folder / "result"
        return json.loads(result.read_text()) if self.process.returncode == 0 and result.exists() else {}


def steps_after(log: list[dict[str, Any]], moment: float) -> list[dict[str, Any]]:
    return [line for line in log if "step" in line and line["at"] > moment]


def disturb(job: Job, events: int, draw: random.Random) -> list[str]:
    """Let things happen, and return what went wrong."""
    slots, wrong = MOST, []
    for event in range(events):
        begun = len(steps_after(job.log(), 0.0))
        # Far enough that there is a new commit: three failures without one end a job.
        if not job.wait_for(lambda log, begun=begun: len(steps_after(log, 0.0)) > begun + COMMIT):
            return [*wrong, f"before event {event}: no steps any more"]
        time.sleep(draw.uniform(0.0, 2.0))
        ranks = [line["ranks"] for line in job.log() if "ranks" in line][-1]
        starts = len([line for line in job.log() if "ranks" in line])
        now = time.time()
        if draw.random() < 0.5:
            victims = draw.sample(range(ranks), min(ranks, draw.choice([1, 1, 2])))
            what = f"kills {', '.join(str(rank) for rank in victims if job.kill(rank))} of {ranks}"
        else:
            slots = draw.choice([n for n in range(1, MOST + 1) if n != slots])
            job.offer(slots)
            what = f"{slots} slots instead of {ranks}"
        if not job.wait_for(
            lambda log, starts=starts, now=now: (
                len([line for line in log if "ranks" in line]) > starts and steps_after(log, now)
            )
        ):
            return [*wrong, f"event {event}, {what}: did not go on"]
        begins = [line for line in job.log() if "ranks" in line][-1]
        took = begins["at"] - now
        print(f"event {event:3}: {what:24} goes on after {took:4.1f} s on {begins['ranks']} ranks", flush=True)
        if took > 15:
            wrong.append(f"event {event}, {what}: went on after {took:.1f} s")
    return wrong


def check(job: Job, result: dict[str, Any], undisturbed: float) -> list[str]:
    """Return what is not as it should be."""
    if not result:
        return [f"the job ended with {job.process.returncode}; what it said is in {job.folder}/output"]
    wrong = []
    for number, epoch in enumerate(result["epochs"]):
        allowed = sum(size - 1 for size in epoch["deals"])
        if epoch["never"] or epoch["more"] > allowed:
            wrong.append(f"epoch {number}: {epoch['never']} samples lost, {epoch['more']} repeated ({allowed} allowed)")
    log = job.log()
    wrong += [
        f"different bits on ranks at step {line['begins']}" for line in log if line.get("different_states", 1) > 1
    ]
    last = 0
    for line in log:
        if "begins" in line and last - line["begins"] > COMMIT:
            wrong.append(f"{last - line['begins']} steps repeated at step {line['begins']}")
        last = line.get("step", last)
    if abs(result["accuracy"] - undisturbed) > 1.5:
        wrong.append(f"accuracy {result['accuracy']:.1f} %, {undisturbed:.1f} % when undisturbed")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10, help="at least; it goes on until all events have happened")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        train_here(options.rank_of, options.epochs)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="elastic-soak-"))
    undisturbed = Job(folder / "undisturbed", options.epochs, MOST).finish(300)
    if not undisturbed:
        print(f"an undisturbed run fails; what it said is in {folder}/undisturbed/output")
        return 1
    job = Job(folder / "disturbed", options.epochs, MOST)
    wrong = disturb(job, options.events, random.Random(options.seed))
    result = job.finish(300)
    wrong += check(job, result, undisturbed["accuracy"])
    steps = steps_after(job.log(), 0.0)
    repeated = len(steps) - len({line["step"] for line in steps})
    epochs = len(result.get("epochs", []))
    print(
        f"{options.events} events, {epochs} epochs, {len(steps)} steps of which {repeated} were repeated; "
        f"accuracy {result.get('accuracy', 0):.1f} %, undisturbed {undisturbed['accuracy']:.1f} %"
    )
    for problem in wrong:
        print(f"WRONG: {problem}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
