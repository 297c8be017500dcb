"""A real Slurm of several nodes on one machine: without systemd, without cgroups, and gone afterwards. Needs root.

A node is a slurmd with a host name, processes, System V IPC and a /dev/shm of its own: MPI takes nodes for different
hosts (without their own IPC, MPICH's start timed out now and then), and what a job leaves behind ends with its node.
The network is the machine's. Every process of the cluster ends with the one that started it, in whatever way.

The programs are Debian's slurm-wlm, munge and libpmix-dev (for `srun --mpi=pmix`); unshare and setpriv are util-linux.
"""

from __future__ import annotations

import contextlib
import glob
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

PACKAGES = ("slurm-wlm", "munge", "libpmix-dev")
_DAEMONS = {"slurmctld": "/usr/sbin/slurmctld", "slurmd": "/usr/sbin/slurmd", "munged": "/usr/sbin/munged"}
_COMMANDS = ("srun", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "unshare", "setpriv", "mount")
_PMIX = "/usr/lib/*/libpmix.so"  # its name without a number: the plugin asks for that, so libpmix2 does not do
_OF_A_NODE = {"sh", "slurmd"}  # what runs on a node that has no job
# What the surroundings of the tests would add to the jobs.
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM", "SBATCH_", "SRUN_", "HYDRA_", "MPI_", "HVDLITE_", "HOROVOD_")

# Not usual, and why:
# proctrack/linuxproc, task/none: there are no cgroups.
# config_overrides: slurmd drains a node that has fewer CPUs than it says.
# TmpFS: one per node, or the mpi/pmix plugins of two slurmd fight over one folder.
# KillWait: seconds between SIGTERM and SIGKILL at the time limit.
# Gres: four GPUs on each node, which are no GPUs; enough for Slurm to hand them out by CUDA_VISIBLE_DEVICES.
# Partition aside: the last node, for jobs that run on while others are tested.
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
CredType=cred/munge
MpiDefault=none
MailProg=/bin/true
GresTypes=gpu
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=50000,batch_sched_delay=0
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
KillWait=1
MinJobAge=300
UnkillableStepTimeout=10
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmdSpoolDir={place}/spool-%n
TmpFS={place}/tmp-%n
StateSaveLocation={place}/state
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
PlugStackConfig={place}/plugstack.conf
{nodes}
PartitionName=main Nodes={main} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=aside Nodes={aside} MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_NODE = "NodeName={name} NodeHostname={machine} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000 Gres=gpu:4"
# `sh` stays, as the first process of the node, which takes care of orphans.
_START_NODE = 'ulimit -c 0; hostname "$0" && mount -t tmpfs -o size=1g tmpfs /dev/shm && { "$@" & wait; }'


def missing() -> str:
    """Return what keeps this machine from having such a cluster, or "" if nothing does."""
    lost = [name for name, path in _DAEMONS.items() if not os.path.exists(path)]
    lost += [name for name in _COMMANDS if shutil.which(name) is None]
    lost += [] if glob.glob(_PMIX) else ["libpmix.so"]
    if lost:
        return f"{', '.join(lost)} not found (on Debian: apt install {' '.join(PACKAGES)})"
    if os.geteuid() != 0:
        return "only root can make nodes"
    tried = subprocess.run(
        ["unshare", "--uts", "--ipc", "--pid", "--fork", "--mount", "true"], capture_output=True, text=True
    )
    return tried.stderr.strip()


class Cluster:
    """`with Cluster(3) as slurm:` nodes n1 and n2, ready for jobs, and n3, for jobs in the partition aside.

    Args:
        n: how many nodes.
        cpus: how many each says it has.
    """

    def __init__(self, n: int, cpus: int = 4) -> None:
        self.names = [f"n{number}" for number in range(1, n + 1)]
        self._cpus = cpus
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._place = Path()

    def __enter__(self) -> Cluster:
        self._place = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: sockets have short paths
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def environment(self) -> dict[str, str]:
        """Return the environment of commands for this cluster, and so of its jobs."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        # Nodes share the cores of one machine, which no rank can know: waiting ranks have to let others run.
        environ.update(OMPI_MCA_mpi_yield_when_idle="1")
        if device := _device():
            environ.update(UCX_NET_DEVICES=device)
        environ.update(SLURM_CONF=str(self._place / "slurm.conf"), TMPDIR=str(self._place / "tmp"))
        return environ

    def run(
        self, *command: Any, timeout: float = 60, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command for this cluster. One that takes too long is ended, with its jobs, and the test fails."""
        try:
            return subprocess.run(
                list(map(str, command)), env={**self.environment(), **(env or {})}, cwd=cwd, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.clear()
            raise

    def state(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job: JobState, ExitCode, Requeue and the like."""
        words = self.run("scontrol", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, states: Sequence[str], timeout: float = 30) -> dict[str, str]:
        """Return what Slurm says of a job once it is in one of `states`."""
        deadline = time.monotonic() + timeout
        while (found := self.state(job)).get("JobState") not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is not {states} but {found}\n{self.logs()}")
            time.sleep(0.05)
        return found

    def processes(self, aside: bool = False) -> dict[int, str]:
        """Return what runs for jobs, on the node aside or on the others: names by pid."""
        names = self.names[-1:] if aside else self.names[:-1]
        spaces = {_space(node) for node in self._first_processes(names)}
        found = {
            pid: _name(pid) for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _space(pid) in spaces
        }
        return {pid: name for pid, name in found.items() if name and name not in _OF_A_NODE}

    def files(self) -> list[str]:
        """Return what lies in the shared memory of the nodes, except aside, and is not MPI's own.

        Both MPIs leave some there when a job is aborted.
        """
        found = [name for node in self._first_processes(self.names[:-1])
                 for name in os.listdir(f"/proc/{node}/root/dev/shm")]  # fmt: skip
        return [name for name in found if not name.startswith(("sm_segment.", "mpich_shm_"))]

    def _first_processes(self, names: Sequence[str]) -> list[int]:
        return [child for name in names for child in _children(self._daemons[name].pid)]

    def clear(self, timeout: float = 20) -> None:
        """End all jobs, and wait until nothing of theirs runs."""
        subprocess.run(["scancel", "--user=root"], env=self.environment(), capture_output=True)
        deadline = time.monotonic() + timeout
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the ends of Slurm's logs, for messages."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-800:]}" for path in sorted(self._place.glob("*.log")))

    def _start(self) -> None:
        self._place.chmod(0o755)
        for name in ["state", "tmp", *(f"{what}-{node}" for what in ("spool", "tmp") for node in self.names)]:
            (self._place / name).mkdir()
        (self._place / "plugstack.conf").touch()
        for number in range(4):  # each is /dev/null under another name
            os.mknod(self._place / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (self._place / "gres.conf").write_text(f"Name=gpu File={self._place}/gpu[0-3]\n")
        machine = socket.gethostname().split(".")[0]
        ports = _free_ports(len(self.names) + 1)
        nodes = [_NODE.format(name=name, machine=machine, port=port, cpus=self._cpus)
                 for name, port in zip(self.names, ports[1:], strict=True)]  # fmt: skip
        (self._place / "slurm.conf").write_text(
            _CONFIGURATION.format(
                machine=machine,
                place=self._place,
                port=ports[0],
                nodes="\n".join(nodes),
                main=",".join(self.names[:-1]),
                aside=self.names[-1],
            )
        )
        self._start_munge()
        conf = self._place / "slurm.conf"
        self._spawn("slurmctld", _DAEMONS["slurmctld"], "-D", "-c", "-f", conf)
        for name in self.names:
            own = [
                "unshare",
                "--uts",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                _START_NODE,
                name,
            ]
            self._spawn(name, *own, _DAEMONS["slurmd"], "-D", "-N", name, "-f", conf)
        self._until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * len(self.names))

    def _start_munge(self) -> None:
        key = self._place / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{what}={self._place / file}" for what, file in {**files, "seed-file": "munge.seed"}.items()]
        self._spawn("munged", _DAEMONS["munged"], "--foreground", "--num-threads=2", *options)
        self._until((self._place / "munge.socket").exists)

    def _spawn(self, name: str, *command: Any) -> None:
        with open(self._place / f"{name}.out.log", "wb") as out:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *map(str, command)], env=self.environment(),
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def _until(self, ready: Any, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"Slurm does not start; ended: {ended}\n{self.logs()}")
            time.sleep(0.02)

    def _stop(self) -> None:
        if "slurmctld" in self._daemons:
            self.clear()
        # unshare(1) takes no SIGTERM while its child runs; by SIGKILL it goes with all that runs on the node.
        for name in reversed(self._daemons):
            self._daemons[name].send_signal(signal.SIGKILL if name in self.names else signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self._place, ignore_errors=True)


def _free_ports(n: int) -> list[int]:
    """Return ports below those that the system gives to connections, which would take one before Slurm does."""
    found: list[int] = []
    while len(found) < n:
        port = random.randint(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found += [] if port in found else [port]
    return found


def _device() -> str:
    """Return the network device of the default route, for MPICH.

    Its ranks tell each other the addresses of all devices. With a dozen and more, as other tests make
    them, that is longer than Slurm's pmi2 takes: "value not properly terminated", and all ranks wait for ever.
    """
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    return next((device for device, destination, *_ in routes if destination == "00000000"), "")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _name(pid: int) -> str:
    """Return the name of a process that runs; "" if it has ended."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except OSError:
        return ""
    return "" if rest.split()[0] == "Z" else name
