"""Options of hvdrun itself: inside of allocations, and with each MPI where output is concerned."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from hvdlite.launch import cli

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1,2", "SLURM_NTASKS": "3"}
# Whole lines at once: MPICH labels what arrives, and that may be a part of a line.
SPEAK = (
    "import os, sys; os.write(1, f'out {chr(32).join(sys.argv[1:])}\\n'.encode()); os.write(2, b'err\\n');"
    "sys.exit(3 if 'fail' in sys.argv else 0)"
)


@pytest.fixture
def printed(monkeypatch, capsys):
    """`printed(version, *arguments, **environ)` returns the line that --print-command prints."""

    def printed(version: str, *arguments: str, **environ: str) -> str:
        monkeypatch.setattr(cli.process, "ask", lambda argv: version)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert cli.main(["--print-command", *arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize(("version", "n"), [("mpirun (Open MPI) 5.0.11", "-np 3 "), ("HYDRA build details:", "-n 3 ")])
def test_inside_slurm_neither_ranks_nor_hosts_need_be_said(printed, version, n):
    line = printed(version, "python", "train.py", **SLURM)
    assert n in line
    assert "-host" not in line
    assert "oversubscribe" not in line


def test_inside_slurm_hosts_that_are_named_count(printed):
    assert "-np 2 --bind-to none --host n2:2 " in printed("Open MPI 5.0", "-H", "n2:2", "python", "train.py", **SLURM)


def test_inside_pbs_ranks_and_hosts_come_from_the_list(printed, tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\n")
    environ = {"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert "-np 3 --bind-to none --host a:2,b:1 " in printed("Open MPI 5.0", "python", "train.py", **environ)


def test_more_ranks_than_an_allocation_has_are_told(monkeypatch, capsys):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["-np", "4", "python", "train.py"]) == cli.CANNOT_START
    assert "-np: 4 ranks on n1:1,n2:2 of this Slurm job, which take 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_hvdrun_behind_another_launcher_is_told(monkeypatch, capsys, name):
    monkeypatch.setenv(name, "1")
    assert cli.main(["-np", "2", "--print-command", "true"]) == 0  # alone, as in the shell of srun --pty
    monkeypatch.setenv(name, "4")
    assert cli.main(["-np", "2", "--print-command", "true"]) == cli.CANNOT_START
    assert f"hvdrun itself was started 4 times ({name}=4)" in capsys.readouterr().err


def test_options_of_ssh_and_devices_reach_the_launcher(printed):
    line = printed(
        "Open MPI 5.0", "-H", "a:1,b:1", "-p", "77", "-i", "/key", "--start-timeout", "9", "--network-interfaces",
        "eth0,eth1", "--network-interface=eth0", "true",
    )  # fmt: skip
    assert "--prtemca plm_ssh_args '-p 77 -i /key -o ConnectTimeout=9' --mca btl_tcp_if_include eth0,eth1 " in line
    assert line.startswith("NCCL_SOCKET_IFNAME=eth0,eth1 ") or " NCCL_SOCKET_IFNAME=eth0,eth1 " in line


@pytest.mark.parametrize("option", [["--mpi"], ["--launcher", "mpirun"], ["--binding-args=--bind-to socket"]])
def test_horovodruns_ways_to_say_it_are_taken(printed, option):
    line = printed("Open MPI 5.0", "-np", "2", *option, "true")
    assert ("--bind-to socket" in line) == ("socket" in option[-1])
    assert ("--bind-to none" in line) != ("socket" in option[-1])


def hvdrun(mpi, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PATH": "/usr/bin:/bin"}
    command = [mpi.python, "-m", "hvdlite.launch", *arguments, "python", "-c", SPEAK]
    return subprocess.run(
        [*map(str, command), "x", *(["fail"] if "11" in arguments else [])],
        env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.mpi
def test_each_rank_writes_into_files_of_its_own(mpi, tmp_path):
    done = hvdrun(mpi, "-np", "11", "--output-filename", f"{tmp_path}/a b")
    assert done.returncode == 3
    assert f"hvdrun: exit code 3; what the ranks wrote is in {tmp_path}/a b" in done.stderr
    folders = sorted(path.name for path in (tmp_path / "a b").iterdir())
    assert {"rank.00", "rank.10"} & set(folders)  # a rank that fails may end those that have not started
    assert all(re.fullmatch(r"rank\.\d\d", name) for name in folders)
    texts = {(file.name, file.read_text()) for file in (tmp_path / "a b").glob("*/*")}
    assert {("stdout", "out x fail\n"), ("stderr", "err\n")} <= texts


@pytest.mark.mpi
def test_lines_have_the_time_and_the_rank_in_front(mpi):
    done = hvdrun(mpi, "-np", "2", "--prefix-output-with-timestamp")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[(\d)\]\S* out x$", done.stdout, re.MULTILINE)
    assert sorted(found) == ["0", "1"]
