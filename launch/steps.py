"""Arguments for launchers that belong to a scheduler and start ranks of any MPI: Slurm's srun and LSF's jsrun."""

from __future__ import annotations

from .hosts import Faults, shown
from .hydra import one_number
from .job import Job

# mpirun's words for what ranks are bound to, in srun's.
_BINDINGS = {"core": "cores", "hwthread": "threads", "socket": "sockets", "package": "sockets", "numa": "ldoms"}


def srun(job: Job, pmi: str) -> list[str]:
    """Return the arguments for srun; `pmi` is how the MPI of the ranks finds its neighbours."""
    args = [f"--mpi={pmi}", f"--ntasks={job.ranks}", "--kill-on-bad-exit=1"]
    args += job.binding or [f"--cpu-bind={_BINDINGS.get(job.bind_to, job.bind_to)}"]
    if job.hosts:
        if not one_number(job.places):
            raise Faults([f"-H: srun spreads ranks evenly, here {shown(job.places)}. Use --launcher mpirun"])
        args += [f"--nodes={len(job.places)}", f"--ntasks-per-node={job.places[0].slots}"]
        args += [f"--nodelist={','.join(host.name for host in job.places)}"]
    return args


def jsrun(job: Job) -> list[str]:
    """Return the arguments for jsrun: one resource set per host, with all its cores and GPUs, as under mpirun."""
    places = job.places
    if len({host.slots for host in places}) != 1:
        why = f"here {shown(places)}" if places else "and LSB_MCPU_HOSTS names no hosts"
        raise Faults([f"-np: jsrun starts the same number of ranks on each host, {why}"])
    args = ["--nrs", str(len(places)), "--rs_per_host", "1", "--tasks_per_rs", str(places[0].slots)]
    args += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", *(job.binding or ["--bind", _jsrun_binding(job)])]
    if job.tcp:
        args += ["--smpiargs=-tcp"]
    for export in job.exports:
        args += ["-E", export]
    return args


def _jsrun_binding(job: Job) -> str:
    return {"core": "packed:1"}.get(job.bind_to, job.bind_to)
