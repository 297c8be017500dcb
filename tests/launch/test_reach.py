"""The question to other hosts, and what answers and silence mean. With real hosts: tests/hosts."""

from __future__ import annotations

import re

import pytest

from hvdlite.launch import reach
from hvdlite.launch.flavours import Flavour
from hvdlite.launch.job import Job
from hvdlite.launch.reach import Answer

JOB = Job(command=("python", "train.py"), ranks=2)
OWN = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]


@pytest.mark.parametrize(
    ("flavour", "more", "environ", "expected"),
    [
        (Flavour.OPEN_MPI, {}, {}, ["ssh", *OWN]),
        (Flavour.HYDRA, {"ssh": ("-p", "22")}, {}, ["ssh", "-p", "22", *OWN]),
        (Flavour.OPEN_MPI, {"mpi_args": ("--prtemca", "plm_ssh_agent", "/my/agent -q : rsh")}, {}, ["/my/agent", "-q"]),
        (Flavour.OPEN_MPI_4, {}, {"OMPI_MCA_plm_rsh_agent": "/bin/ssh"}, ["/bin/ssh", *OWN]),
        (Flavour.OPEN_MPI, {}, {"PRTE_MCA_plm_ssh_args": "-F file"}, ["ssh", "-F", "file", *OWN]),
        (Flavour.HYDRA, {"mpi_args": ("-launcher-exec", "/my/agent")}, {}, ["/my/agent"]),
        (Flavour.HYDRA, {}, {"HYDRA_LAUNCHER_EXTRA_ARGS": "-4"}, ["ssh", "-4", *OWN]),
        (Flavour.HYDRA, {"mpi_args": ("-launcher", "slurm")}, {}, None),
        (Flavour.SRUN, {}, {}, None),
        (Flavour.PALS, {}, {}, None),
    ],
)
def test_hosts_are_asked_by_the_way_that_mpirun_takes(flavour, more, environ, expected):
    job = Job(command=("python", "train.py"), ranks=2, **more)
    assert reach.remote_shell(job, flavour, environ) == expected


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "this name is not known here"),
        ("ssh: connect to host b port 7: Connection refused", r"its port 7 \(10.0.0.2\) is closed"),
        (
            "ssh: connect to host b port 7: Connection timed out",
            r"no answer \(10.0.0.2\): it is down.*Try: ssh -p 7 b true",
        ),
        ("warning\nHost key verification failed.", "Run `ssh b` once"),
        ("root@b: Permission denied (publickey).", "ssh-copy-id b"),
        ("\n", "ssh ended with 255 and said: nothing. Try: ssh -p 7 b true"),
    ],
)
def test_silence_has_a_cause_and_a_remedy(said, message):
    text = reach.no_answer("b", "10.0.0.2", 255, said, ["ssh", "-p", "7"])
    assert re.search(message, text), text


def test_a_host_that_was_reached_and_says_nothing():
    assert "did not answer within 20 s" in reach.no_answer("b", "", None, "", ["ssh"])
    assert "did not answer within 11 s" in reach.no_answer("b", "", None, "", ["ssh"], 11.0)


def test_ssh_is_told_once_how_long_to_wait():
    job = Job(command=("x",), ranks=1, ssh=("-o", "ConnectTimeout=1"))
    shell = reach.remote_shell(job, Flavour.OPEN_MPI, {})
    assert shell == ["ssh", "-o", "ConnectTimeout=1", "-o", "BatchMode=yes"]


def test_a_missing_ssh_is_named():
    assert "openssh-client" in reach.no_answer("b", "", None, "ssh cannot be run: [Errno 2]", ["ssh"])


def test_an_answer_is_found_between_other_lines():
    said = "Welcome!\n@ host b\n@ lacks directory\n@ mpi 5.0\n@ blocked 10.0.0.1 timed out\n@ loopback a 127.0.1.1\n"
    assert reach.read(said) == Answer(
        facts={"host": "b", "mpi": "5.0"},
        lacks=("directory",),
        loopback={"a": "127.0.1.1"},
        blocked={"10.0.0.1": "timed out"},
    )
    assert reach.read("Welcome!\n") is None


def test_each_host_tries_those_that_follow_it():
    hosts = list("abcdefg")
    assert reach.neighbours(hosts, 5) == ["g", "a", "b", "c"]
    assert reach.neighbours(["a"], 0) == []
    tried = {(host, other) for place, host in enumerate("abc") for other in reach.neighbours("abc", place)}
    assert len(tried) == 6  # all pairs of a few


def test_what_is_missing_here_too_is_no_fault_there():
    here, there = Answer({"host": "a"}, lacks=("mpi",)), Answer({"host": "b"}, lacks=("mpi",))
    assert reach.faults(JOB, Flavour.OPEN_MPI, here, {"b": there}, "/here", "/bin/mpirun") == []


def test_one_fault_of_many_hosts_is_one_line():
    here = Answer({"host": "a", "mpi": "5.0.1"})
    answers = {name: Answer({"host": name, "mpi": "4.1.4"}) for name in "bcd"}
    found = reach.faults(JOB, Flavour.OPEN_MPI, here, answers, "/here", "/bin/mpirun")
    assert found == ["hosts b, c, d: the MPI there is 4.1.4, here it is 5.0.1. Install the same on all hosts"]


def test_a_program_that_is_not_python_needs_no_hvdlite():
    job = Job(command=("./train",), ranks=2)
    here, there = Answer({"host": "a", "hvdlite": "1", "python": "3.11"}), Answer({"host": "b", "python": "3.9"})
    assert reach.faults(job, Flavour.OPEN_MPI, here, {"b": there}, "/here", "/bin/mpirun") == []
    assert len(reach.faults(JOB, Flavour.OPEN_MPI, here, {"b": there}, "/here", "/bin/mpirun")) == 2


@pytest.mark.parametrize(
    ("more", "environ", "expected"),
    [
        ({}, {"PORT": "1", "HVDLITE_X": "", "PATH": "/port"}, False),
        ({}, {"OMPI_MCA_btl_tcp_port_min_v4": "5000"}, True),
        ({}, {"MPICH_PORT_RANGE": "5000:6000"}, True),
        ({}, {"MPIEXEC_PORT_RANGE": "5000:6000"}, True),
        ({"mpi_args": ("--mca", "btl_tcp_port_min_v4", "5000")}, {}, True),
        ({"exports": ("MPIR_CVAR_CH4_IP_PORT_RANGE=5000:6000",)}, {}, True),
    ],
)
def test_ports_chosen_by_the_user_are_not_doubted(more, environ, expected):
    assert reach.ports_are_chosen(Job(command=("python",), ranks=2, **more), environ) is expected


def test_the_question_quotes_what_it_is_about():
    job = Job(command=("my prog",), ranks=2, exports=("PATH=/a b:/c",))
    text = reach.question(job, "/o p/mpirun", "/d'ir", {"PATH": "/no", "LD_LIBRARY_PATH": "/l"}, ["10.0.0.1"])
    assert "cd '/d'\"'\"'ir'" in text
    assert "export PATH='/a b:/c'; export LD_LIBRARY_PATH=/l\n" in text
    assert "command -v 'my prog'" in text
    assert "v=$('/o p/mpirun' --version" in text
    assert text.rstrip().endswith("10.0.0.1 </dev/null\nexit 0")
