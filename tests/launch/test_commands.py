"""Jobs to command lines, one table for all launchers: whole lines are compared, and the variables set for them."""

from __future__ import annotations

import shlex

import pytest

from hvdlite.errors import LaunchError
from hvdlite.launch.allocation import Allocation, Scheduler
from hvdlite.launch.flavours import Flavour, pmi_of
from hvdlite.launch.hosts import Faults, Host
from hvdlite.launch.job import Job, parse_hosts
from hvdlite.launch.mpirun import added_environment, render_command

F = Flavour
TRAIN = ("python", "train.py")
SLURM = Allocation(Scheduler.SLURM, (Host("n1", 2), Host("n2", 2)), 4)
PBS = Allocation(Scheduler.PBS, (Host("n1", 2), Host("n2", 2)))
LSF = Allocation(Scheduler.LSF, (Host("n1", 2), Host("n2", 2)))
JOBS = {
    "here": {},
    "hosts": {"hosts": parse_hosts("a:2,b:2"), "exports": ("A=1,2",)},
    "uneven": {"hosts": parse_hosts("a:1,b:3")},
    "slurm": {"allocation": SLURM, "exports": ("A=1,2",)},
    "pbs": {"allocation": PBS},
    "lsf": {"allocation": LSF, "exports": ("A=1,2",)},
    "core": {"bind_to": "core"},
    "binding": {"binding": ("-bind-to", "socket", "-map-by", "slot")},
    "ssh": {"hosts": parse_hosts("a:2,b:2"), "ssh": ("-p", "77", "-i", "key")},
    "device": {"hosts": parse_hosts("a:2,b:2"), "interfaces": ("eth0",)},
    "tcp": {"tcp": True},
}
ENVIRON = {"PATH": "/bin", "HF_TOKEN": "s", "CUDA_VISIBLE_DEVICES": "0", "SLURM_CPUS_PER_TASK": "3", "HOME": "/h"}
NCCL = {"NCCL_SOCKET_IFNAME": "eth0"}
MPICH_DEVICE = {**NCCL, "UCX_NET_DEVICES": "eth0", "FI_TCP_IFACE": "eth0"}
CPUS = {"SRUN_CPUS_PER_TASK": "3"}
BLAUNCH = {"OMPI_MCA_plm_rsh_agent": "blaunch", "PRTE_MCA_plm_ssh_agent": "blaunch"}
NO_PIN = {"I_MPI_PIN": "0"}
STEP = "--mpi=pmix --ntasks=4 --kill-on-bad-exit=1"
RS = "--tasks_per_rs 2 --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS"

# The line after the launcher's name and before the program, and variables; those of Open MPI's start here are left out.
TABLE = [
    (F.OPEN_MPI, "here", "-np 4 --bind-to none --oversubscribe", {}),
    (F.OPEN_MPI, "hosts", "-np 4 --bind-to none --host a:2,b:2 -x A=1,2 -x PATH", {}),
    (F.OPEN_MPI, "uneven", "-np 4 --bind-to none --host a:1,b:3 -x PATH", {}),
    (F.OPEN_MPI, "slurm", "-np 4 --bind-to none -x A=1,2 -x PATH", {}),
    (F.OPEN_MPI, "pbs", "-np 4 --bind-to none --host n1:2,n2:2 -x PATH", {}),
    (F.OPEN_MPI, "lsf", "-np 4 --bind-to none --host n1:2,n2:2 -x A=1,2 -x PATH", BLAUNCH),
    (F.OPEN_MPI, "core", "-np 4 --bind-to core --oversubscribe", {}),
    (F.OPEN_MPI, "binding", "-np 4 -bind-to socket -map-by slot --oversubscribe", {}),
    (F.OPEN_MPI, "ssh", "-np 4 --bind-to none --host a:2,b:2 --prtemca plm_ssh_args '-p 77 -i key' -x PATH", {}),
    (F.OPEN_MPI, "device", "-np 4 --bind-to none --host a:2,b:2 --mca btl_tcp_if_include eth0 "
     "--prtemca prte_if_include eth0 -x NCCL_SOCKET_IFNAME -x PATH", NCCL),
    (F.OPEN_MPI_4, "ssh", "-np 4 --bind-to none --host a:2,b:2 --mca plm_rsh_args '-p 77 -i key' -x PATH", {}),
    (F.OPEN_MPI_4, "device", "-np 4 --bind-to none --host a:2,b:2 --mca btl_tcp_if_include eth0 "
     "--mca oob_tcp_if_include eth0 -x NCCL_SOCKET_IFNAME -x PATH", NCCL),
    (F.SPECTRUM, "tcp", "-np 4 --bind-to none --oversubscribe -tcp", {}),
    (F.SPECTRUM, "hosts", "-np 4 --bind-to none --host a:2,b:2 -x A=1,2 -x PATH", {}),
    (F.HYDRA, "here", "-n 4 -bind-to none", {}),
    (F.HYDRA, "hosts", "-n 4 -bind-to none -hosts a:2,b:2 -genv A 1,2", {}),
    (F.HYDRA, "uneven", "-n 4 -bind-to none -hosts a:1,b:3", {}),
    (F.HYDRA, "slurm", "-n 4 -bind-to none -genv A 1,2", {}),
    (F.HYDRA, "pbs", "-n 4 -bind-to none", {}),
    (F.HYDRA, "ssh", "-n 4 -bind-to none -hosts a:2,b:2", {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 77 -i key"}),
    (F.HYDRA, "device", "-n 4 -bind-to none -hosts a:2,b:2 -iface eth0", MPICH_DEVICE),
    (F.INTEL, "here", "-n 4", NO_PIN),
    (F.INTEL, "core", "-n 4", {"I_MPI_PIN_DOMAIN": "core"}),
    (F.INTEL, "hosts", "-n 4 -ppn 2 -hosts a,b -genv A 1,2", NO_PIN),
    (F.INTEL, "ssh", "-n 4 -ppn 2 -hosts a,b -bootstrap ssh -bootstrap-exec-args '-p 77 -i key'", NO_PIN),
    (F.INTEL, "uneven", "-host a -n 1 python train.py : -host b -n 3", NO_PIN),
    (F.PALS, "pbs", "-n 4 --ppn 2 --cpu-bind none", {}),
    (F.PALS, "hosts", "-n 4 --ppn 2 --cpu-bind none --hosts a,b --env A=1,2", {}),
    (F.SRUN, "slurm", f"{STEP} --cpu-bind=none", {**CPUS, "A": "1,2"}),
    (F.SRUN, "core", f"{STEP} --cpu-bind=cores", CPUS),
    (F.SRUN, "hosts", f"{STEP} --cpu-bind=none --nodes=2 --ntasks-per-node=2 --nodelist=a,b", {**CPUS, "A": "1,2"}),
    (F.SRUN, "device", f"{STEP} --cpu-bind=none --nodes=2 --ntasks-per-node=2 --nodelist=a,b",
     {**CPUS, **MPICH_DEVICE, "OMPI_MCA_btl_tcp_if_include": "eth0"}),
    (F.JSRUN, "lsf", f"--nrs 2 --rs_per_host 1 {RS} --bind none -E A=1,2", {}),
]  # fmt: skip


@pytest.mark.parametrize(("flavour", "kind", "line", "variables"), TABLE, ids=lambda value: getattr(value, "name", ""))
def test_a_job_has_one_command_line_per_launcher(flavour, kind, line, variables):
    job = Job(command=TRAIN, ranks=4, **JOBS[kind])
    added = added_environment(job, flavour, False, ENVIRON)
    assert {name: value for name, value in added.items() if name not in ("OMPI_MCA_btl", "OMPI_MCA_osc",
            "OMPI_MCA_mpi_yield_when_idle")} == variables  # fmt: skip
    rendered = render_command(job, flavour, "start", {**ENVIRON, **added}, "pmix")
    assert shlex.join(rendered) == f"start {line} python train.py"


@pytest.mark.parametrize(
    ("flavour", "kind", "message"),
    [
        (F.PALS, "uneven", "-H: PALS starts the same number of ranks on each host, here a:1,b:3"),
        (F.SRUN, "uneven", "-H: srun spreads ranks evenly, here a:1,b:3. Use --launcher mpirun"),
        (F.JSRUN, "here", "-np: jsrun starts the same number of ranks on each host, and LSB_MCPU_HOSTS"),
        (F.JSRUN, "uneven", "-np: jsrun starts the same number of ranks on each host, here a:1,b:3"),
    ],
)
def test_what_a_launcher_cannot_say_is_told(flavour, kind, message):
    with pytest.raises(Faults) as caught:
        render_command(Job(command=TRAIN, ranks=4, **JOBS[kind]), flavour, "start", {})
    assert str(caught.value).startswith(message)


def test_hydra_takes_one_device():
    with pytest.raises(Faults, match="--network-interfaces: hydra takes one, here eth0,eth1"):
        render_command(Job(command=TRAIN, ranks=1, interfaces=("eth0", "eth1")), F.HYDRA, "start", {})


def test_between_its_daemons_open_mpi_is_not_told_to_use_loopback():
    rendered = render_command(Job(command=TRAIN, ranks=1, interfaces=("lo",)), F.OPEN_MPI, "start", {})
    assert "prte_if_include" not in rendered


@pytest.mark.parametrize(("flavour", "name"), [(F.INTEL, "I_MPI_PIN"), (F.SRUN, "SRUN_CPUS_PER_TASK")])
def test_what_the_user_has_set_stays(flavour, name):
    environ = {"SLURM_CPUS_PER_TASK": "3", name: "mine"}
    assert added_environment(Job(command=TRAIN, ranks=1), flavour, False, environ) == {}


@pytest.mark.parametrize("name", ["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"])
def test_the_users_way_to_other_hosts_stays_under_lsf(name):
    added = added_environment(Job(command=TRAIN, ranks=1, allocation=LSF), F.OPEN_MPI, False, {name: "ssh"})
    assert name not in added


@pytest.mark.parametrize(
    ("library", "pmi"),
    [
        ("Open MPI v5.0.11, package: Open MPI", "pmix"),
        ("mpirun (Open MPI) 4.1.4", "pmix"),
        ("MPICH Version:      5.0.2", "pmi2"),
        ("HYDRA build details:", "pmi2"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", "cray_shasta"),
    ],
)
def test_srun_gets_the_type_that_fits_the_mpi(library, pmi):
    assert pmi_of(library) == pmi


def test_an_mpi_without_a_known_type_is_quoted():
    with pytest.raises(LaunchError, match="'Some MPI 1.0'"):
        pmi_of("Some MPI 1.0\n")
