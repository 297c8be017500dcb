"""The standard input of a job: rank 0 reads it whole and sees its end, the other ranks have none."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from hvdlite.launch.feed import packet
from hvdlite.launch.runner import Input

READ = "import hashlib, sys; d = sys.stdin.buffer.read(); print(len(d), hashlib.md5(d).hexdigest())"
# Rank 0 names its runner and ends. Rank 1 tells when that has ended as well, and goes on for a little.
OUTLIVE = """
import os, sys, time
name = sys.argv[1]
if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "0":
    with open(f"{name}.new", "w") as file: file.write(str(os.getppid()))
    os.rename(f"{name}.new", name)
    sys.exit()
while not os.path.exists(name): time.sleep(0.01)
status = f"/proc/{open(name).read()}/status"
while os.path.exists(status) and "State:\\tZ" not in open(status).read(): time.sleep(0.01)
print("alone", flush=True)
time.sleep(0.5)
print("through")
"""
PIECES = [b"one\n", b"\x1e2 \n", bytes(range(256)) * 8, b""]


def test_packets_become_what_went_in_wherever_they_are_cut():
    sent = b"".join(packet(number, piece) for number, piece in enumerate(PIECES))
    for size in (1, 7, 4096):
        into = Input()
        assert b"".join(into.feed(sent[at : at + size]) for at in range(0, len(sent), size)) == b"".join(PIECES)
        assert into.is_over and into.count == 4


@pytest.mark.parametrize("cut", [0, 1, 9, 30])
def test_what_comes_twice_is_taken_once(cut):
    # As Open MPI does it: a block is written in part, and then again from its beginning.
    packets = [packet(number, piece) for number, piece in enumerate(PIECES)]
    block = b"".join(packets[:3])
    into = Input()
    sent = block[: len(block) - cut] + block[3:] + block + packets[3]
    assert into.feed(sent) == b"".join(PIECES)
    assert into.is_over


def test_a_packet_that_was_put_together_from_two_is_none():
    whole = packet(0, b"a" * 30)
    into = Input()
    assert into.feed(whole[:20] + whole[28:]) == b"" and into.count == 0
    assert into.feed(whole) == b"a" * 30


def hvdrun(mpi, *arguments, **more) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, "PATH": "/usr/bin:/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    command = [str(mpi.python), "-m", "hvdlite.launch", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, timeout=60, **more)


@pytest.mark.mpi
@pytest.mark.parametrize("size", [0, 6, 300_001])  # 64 KB are too much for the mpiruns themselves
def test_rank_0_reads_the_input_and_the_others_none(mpi, size):
    text = os.urandom(size)
    done = hvdrun(mpi, "-np", "3", "python", "-c", READ, input=text)
    assert done.returncode == 0, done.stderr
    whole, none = (f"{len(one)} {hashlib.md5(one).hexdigest()}" for one in (text, b""))
    assert sorted(done.stdout.decode().splitlines()) == [f"[0] {whole}", f"[1] {none}", f"[2] {none}"]


@pytest.mark.mpi
def test_a_program_comes_by_the_standard_input(mpi):
    assert hvdrun(mpi, "-np", "1", "python", "-", input=b"print(6 * 7)").stdout == b"42\n"


@pytest.mark.mpi
def test_a_job_ends_though_its_input_goes_on(mpi):
    ours, theirs = os.pipe()  # nobody writes, and it does not end
    try:
        assert hvdrun(mpi, "-np", "2", "true", stdin=ours).returncode == 0
    finally:
        os.close(ours)
        os.close(theirs)
    with subprocess.Popen("yes", stdout=subprocess.PIPE) as yes:
        done = hvdrun(mpi, "-np", "2", "--no-label", "head", "-n", "1", stdin=yes.stdout)
        yes.kill()
    assert (done.returncode, done.stdout) == (0, b"y\n"), done.stderr


@pytest.mark.mpi
def test_input_that_comes_when_rank_0_has_ended_does_no_harm(mpi, tmp_path):
    command = [str(mpi.python), "-m", "hvdlite.launch", "-np", "2", "--no-label", "python", "-c", OUTLIVE]
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with subprocess.Popen(
        [*command, str(tmp_path / "runner")], env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as job:  # fmt: skip
        try:
            assert job.stdout.readline() == "alone\n"
            out, err = job.communicate("late\n", timeout=30)
        finally:
            job.kill()
    assert (job.returncode, out) == (0, "through\n"), err


@pytest.mark.mpi
def test_a_closed_input_has_ended(mpi):
    shut = "import os, sys; os.close(0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [str(mpi.python), "-m", "hvdlite.launch", "-np", "2", "python", "-c", "print(repr(input()))"]
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run([sys.executable, "-c", shut, *command], env=environ, capture_output=True, timeout=60)
    assert done.returncode == 1 and b"EOFError" in done.stderr, done.stderr
