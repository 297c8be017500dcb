"""A Slurm batch script as text, from a value that describes the job. Nothing is read or written here.

The script starts one task per rank through srun, which knows the nodes, and hands its exit code on.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from hvdlite.errors import LaunchError

from . import mpirun
from .flavours import Flavour
from .job import Job

# Minutes, or as `man sbatch` has it: minutes:seconds, hours:minutes:seconds, days-hours and so on.
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a job asks of Slurm. None: whatever is usual there.

    Attributes:
        nodes: how many machines.
        cpus: CPUs for each rank.
        gpus: GPUs of each node, which all of its ranks see.
        time: limit, as Slurm writes it: minutes, or days-hours:minutes:seconds.
        partition, account: whose machines, and who pays.
        output: file for what all ranks print; %j is the job's number.
        requeue: seconds before the time limit at which the program is told by USR1, and the job queued again.
    """

    nodes: int = 1
    cpus: int | None = None
    gpus: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    output: str | None = None
    requeue: int | None = None

    def faults(self, ranks: int) -> list[str]:
        """Return what is wrong with it for a job of so many ranks."""
        found = [
            f"{option}: {value!r}, expected a whole number, 1 or more"
            for option, value in (("--nodes", self.nodes), ("--cpus-per-task", self.cpus),
                                  ("--gpus-per-node", self.gpus), ("--requeue", self.requeue))
            if value is not None and value < 1
        ]  # fmt: skip
        if ranks < self.nodes:
            found.append(f"-np: {ranks} ranks on {self.nodes} nodes: each node needs a rank. Say -np {self.nodes}")
        if self.time is not None and not _TIME.fullmatch(self.time):
            found.append(f"--time: {self.time!r}, expected minutes, [hours:]minutes:seconds or days-hours[:minutes]")
        if self.requeue is not None and self.time is None:
            found.append("--requeue: needs --time, for it counts from the limit")
        found += [
            f"{option}: {value!r}, expected text without blanks"
            for option, value in (("--partition", self.partition), ("--account", self.account),
                                  ("--output", self.output))
            if value is not None and not re.fullmatch(r"\S+", value)
        ]  # fmt: skip
        return found


def file_name(text: str) -> str:
    """Return an option's value, which an empty variable of a shell would turn into a job that runs."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the file is empty")
    return text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take what concerns batch scripts; `batch_from` says what it means."""
    group = parser.add_argument_group("batch scripts for Slurm")
    add = group.add_argument
    add(
        "--slurm-script",
        type=file_name,
        metavar="FILE",
        help="write a script for sbatch and start nothing; - for the standard output",
    )
    add("-N", "--nodes", type=int, metavar="N", help="number of machines (default: 1)")
    add("--cpus-per-task", type=int, dest="cpus", metavar="N", help="CPUs for each rank")
    add("--gpus-per-node", type=int, dest="gpus", metavar="N", help="GPUs of each machine; its ranks see all of them")
    add("--time", metavar="TIME", help="limit: minutes, or days-hours:minutes:seconds")
    add("--partition", metavar="NAME", help="where to run")
    add("--account", metavar="NAME", help="who pays")
    add("--output", metavar="FILE", help="what all ranks print; %%j is the job's number")
    add("--requeue", type=int, metavar="SECONDS", help="so long before the limit send USR1, then queue again")


_OPTIONS = {
    "nodes": "--nodes", "cpus": "--cpus-per-task", "gpus": "--gpus-per-node", "time": "--time",
    "partition": "--partition", "account": "--account", "output": "--output", "requeue": "--requeue",
}  # fmt: skip


def batch_from(options: argparse.Namespace) -> Batch | None:
    """Return what parsed arguments ask of Slurm; None without --slurm-script."""
    given = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    if options.slurm_script:
        return Batch(**given)
    if given:
        stray = ", ".join(_OPTIONS[name] for name in given)
        raise LaunchError(f"{stray}: for a batch script. Add --slurm-script FILE, or leave it out")
    return None


def faults(options: argparse.Namespace, batch: Batch) -> list[str]:
    """Return what is wrong with `batch`, and which other arguments do not go with a script."""
    found = batch.faults(options.ranks or batch.nodes)  # that -np is missing is told anyway
    if options.hosts or options.hostfile:
        found.append("-H, --hostfile: Slurm chooses the machines. Say -np and -N instead")
    if options.ssh_port or options.ssh_identity_file:
        found.append("--ssh-port, --ssh-identity-file: srun starts ranks without ssh")
    if options.launcher not in ("auto", "srun"):
        found.append(f"--launcher {options.launcher}: the script starts ranks with srun")
    return found


def render(job: Job, batch: Batch, pmi: str, bin_dir: str, more: Mapping[str, str]) -> str:
    """Return a script for sbatch that starts `job`, with the programs of `bin_dir` first on PATH.

    Args:
        pmi: srun's type of process management that fits the MPI of the ranks.
        more: variables to set besides those of `job`.
    """
    # sbatch and srun hand on the environment, so that exports without a value need nothing here.
    given = {"SLURM_CPUS_PER_TASK": str(batch.cpus)} if batch.cpus else {}
    variables = {**mpirun.added_environment(job, Flavour.SRUN, False, given), **more}
    srun = shlex.join(mpirun.render_command(job, Flavour.SRUN, "srun", {}, pmi))
    lines = ["#!/bin/bash", *_directives(job, batch), ""]
    lines += [f'export PATH={shlex.quote(bin_dir)}:"$PATH"']
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += [""]
    lines += [f"exec {srun}"] if batch.requeue is None else _with_requeue(srun)
    return "\n".join(lines) + "\n"


def _directives(job: Job, batch: Batch) -> list[str]:
    # Without --ntasks-per-node Slurm may fill the first node: 3 + 1 instead of 2 + 2.
    tasks, rest = divmod(job.ranks, batch.nodes)
    options: dict[str, object] = {"nodes": batch.nodes}
    options.update({"ntasks": job.ranks} if rest else {"ntasks-per-node": tasks})
    options.update({"cpus-per-task": batch.cpus, "gpus-per-node": batch.gpus, "time": batch.time})
    options.update(partition=batch.partition, account=batch.account, output=batch.output)
    if batch.requeue is not None:
        options.update({"signal": f"B:USR1@{batch.requeue}", "open-mode": "append"})
    found = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return [*found, "#SBATCH --requeue"] if batch.requeue is not None else found


def _with_requeue(command: str) -> list[str]:
    """Return lines that hand USR1 on to the ranks, and queue the job again when they then end with 0."""
    return [
        "# USR1 comes before the time limit. The program then writes a checkpoint and ends with 0;",
        "# it is started again from the queue, and goes on from there.",
        "again=",
        "trap 'again=1; kill -USR1 \"$step\"' USR1",
        f"{command} &",
        "step=$!",
        'wait "$step"',
        "code=$?",
        'while [ -n "$again" ] && kill -0 "$step" 2>/dev/null; do  # the signal ended only the waiting',
        '  wait "$step"',
        "  code=$?",
        "done",
        'if [ -n "$again" ] && [ "$code" -eq 0 ]; then',
        '  echo "queueing job $SLURM_JOB_ID again"',
        '  exec scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
