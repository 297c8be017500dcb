"""What jobs print and how they end, over each MPI."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time

import pytest

# Lines of all sizes, in one write and in parts; what they are can be told from each of them.
WRITE = """
import os, random, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
lengths = random.Random(int(rank))
for n in range(int(sys.argv[1])):
    text = "x" * (lengths.choice((3000, 8000, 65536)) if n % 100 == 0 else lengths.randint(1, 120))
    stream = sys.stdout if n % 2 else sys.stderr
    if n % 5:
        stream.write(f"{rank}:{n}:{text}:{len(text)}\\n")
        continue
    for part in (f"{rank}:{n}:", text, f":{len(text)}", "\\n"):
        stream.write(part)
        stream.flush()
"""

FAIL = """
import os, signal, sys
import numpy as np
import hvdlite as hvd
hvd.init()
hvd.allreduce(np.ones(3))
how = sys.argv[1]
if hvd.rank() == 1:
    print("about to", how)
    if how == "raise": raise ValueError("bad batch")
    if how == "exit": sys.exit(7)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave": os._exit(0)
    if how == "abort":
        from mpi4py import MPI
        MPI.COMM_WORLD.Abort(9)
hvd.allreduce(np.ones(300000))
"""

BAR = """
import os, sys, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
go = sys.argv[1]
if rank == "0":
    sys.stderr.write("\\r 50%"); sys.stderr.flush()
    while not os.path.exists(go): time.sleep(0.01)
    sys.stderr.write("\\r100%\\n")
else:
    print("hello")
"""


def hvdrun(mpi, *arguments: str, code: str, then: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [str(mpi.python), "-m", "hvdlite.launch", *arguments, "python", "-c", code, *then]
    environ = {**os.environ, "PATH": "/usr/bin:/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)


@pytest.mark.mpi
def test_no_line_is_lost_or_broken(mpi):
    lines = 1500
    done = hvdrun(mpi, "-np", "4", code=WRITE, then=(str(lines),))
    assert done.returncode == 0, done.stderr[-2000:]
    for text, first in ((done.stderr, 0), (done.stdout, 1)):
        seen: dict[str, list[int]] = {}
        for line in text.splitlines():
            match = re.fullmatch(r"\[(\d)\] \1:(\d+):(x+):(\d+)", line)
            assert match and len(match[3]) == int(match[4]), line[:200]
            seen.setdefault(match[1], []).append(int(match[2]))
        assert seen == {rank: list(range(first, lines, 2)) for rank in "0123"}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "rank 1 of 3 on {host} ended (the job )?with exit code 1"),
        ("exit", 7, "rank 1 of 3 on {host} ended (the job )?with exit code 7"),
        ("kill", 137, r"rank 1 of 3 on {host} was killed by signal 9 \(SIGKILL\), by hand or because the machine .*"),
    ],
)
def test_the_rank_that_failed_first_has_the_last_word(mpi, how, code, words):
    done = hvdrun(mpi, "-np", "3", code=FAIL, then=(how,))
    assert done.returncode == code, done.stderr
    _, found, last = done.stderr.partition("hvdrun: rank")
    assert found, done.stderr
    first, *lines = (found + last).splitlines()
    assert re.fullmatch(f"hvdrun: {words.format(host=re.escape(os.uname().nodename))}; its last lines:", first), first
    assert f"[1] about to {how}" in lines  # two streams have no order among them
    assert all(line.startswith("[1] ") for line in lines)
    if how == "raise":
        assert "[1] ValueError: bad batch" in lines
    assert not re.search("BAD TERMINATION|prterun|MPI_ABORT was", done.stderr)  # what launchers say about it at length


@pytest.mark.mpi
def test_a_rank_that_aborts_is_named_where_it_lives_to_tell(mpi):
    done = hvdrun(mpi, "-np", "3", code=FAIL, then=("abort",))
    assert done.returncode == 9, done.stderr
    told = next(line for line in done.stderr.splitlines() if line.startswith("hvdrun: r") and "root" not in line)
    named = told.startswith(f"hvdrun: rank 1 of 3 on {os.uname().nodename} ended ")
    # MPICH kills all at once, and then nothing of it may arrive.
    assert named or (mpi.name == "mpich" and "or a rank called MPI_Abort. mpirun ended with exit code 9" in told)


@pytest.mark.mpi
def test_a_rank_that_leaves_the_others_is_no_success(mpi):
    done = hvdrun(mpi, "-np", "3", code=FAIL, then=("leave",))
    assert done.returncode not in (0, 2)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("hvdrun: "))
    assert "0, 2 of 3" in line and "after rank 1 had ended with exit code 0" in line


@pytest.mark.mpi
def test_a_job_needs_no_environment(mpi):
    # As services and cron start programs: no PATH, HOME or TERM.
    command = [str(mpi.python), "-m", "hvdlite.launch", "-np", "2", "--no-label", "echo", "hi"]
    done = subprocess.run(command, env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "hi\nhi\n"), done.stderr


@pytest.mark.mpi
def test_what_the_launcher_refuses_is_shown(openmpi):
    done = hvdrun(openmpi, "-np", "2", "--mpi-args=--no-such-option", code="")
    assert done.returncode not in (0, 2)
    assert "no-such-option" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hvdrun: no rank was started; mpirun ended with exit code ")


@pytest.mark.mpi
def test_open_mpi_may_forgive_the_loss_of_a_rank_and_hvdrun_does_not(openmpi):
    code = "import os, signal; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)"
    forgive = "--mpi-args=--with-ft ulfm"
    assert hvdrun(openmpi, "-np", "2", "--raw", forgive, code=code).returncode in (0, 137)
    done = hvdrun(openmpi, "-np", "2", forgive, code=code)
    assert done.returncode == 137
    assert "hvdrun: rank 1 of 2 on " in done.stderr


@pytest.mark.mpi
def test_one_rank_is_not_labelled_and_no_newline_is_added(openmpi):
    assert hvdrun(openmpi, "-np", "1", code="print('a', end='')").stdout == "a"
    assert hvdrun(openmpi, "-np", "1", "--label", code="print('a')").stdout == "[0] a\n"
    assert hvdrun(openmpi, "-np", "2", "--no-label", code="print('a')").stdout == "a\na\n"


@pytest.mark.mpi
def test_a_bar_of_rank_0_is_seen_on_a_terminal_before_its_line_ends(mpi, tmp_path):
    ours, theirs = pty.openpty()
    go = str(tmp_path / "go")
    command = [str(mpi.python), "-m", "hvdlite.launch", "-np", "2", "python", "-c", BAR, go]
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen, end = b"", time.monotonic() + 60
    try:
        while not re.search(rb"\[1\] hello\r\n\[0\]  50%$", screen):  # the bar below a line of another rank
            assert time.monotonic() < end, screen
            screen += os.read(ours, 4096)
        open(go, "w").close()
        while not screen.endswith(b"\r\x1b[K[0] 100%\r\n"):
            assert time.monotonic() < end, screen
            screen += os.read(ours, 4096)
        assert job.wait(timeout=30) == 0
    finally:
        job.kill()
        job.wait()
        os.close(ours)


@pytest.mark.mpi
def test_a_job_outlives_that_its_output_cannot_be_written(mpi, tmp_path):
    marker = tmp_path / "through"
    code = f"import sys, time; print('hi', flush=True); time.sleep(0.5); open({str(marker)!r}, 'w'); sys.exit(3)"
    command = [str(mpi.python), "-m", "hvdlite.launch", "-np", "1", "python", "-c", code]
    environ = {**os.environ, "PATH": "/usr/bin:/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, env=environ, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("hvdrun: cannot write to standard output") == 1 and "No space left" in done.stderr
    assert marker.exists()


@pytest.mark.mpi
def test_a_job_ends_when_told_though_nobody_reads_its_output(openmpi):
    ours, theirs = os.pipe()
    code = "import sys\nwhile True: print('more')"
    command = [str(openmpi.python), "-m", "hvdlite.launch", "-np", "2", "python", "-c", code]
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    with job:
        try:
            end = time.monotonic() + 60
            while not is_full(ours):
                assert time.monotonic() < end
                time.sleep(0.05)
            job.send_signal(signal.SIGINT)
            assert job.wait(timeout=10) == 130
        finally:
            os.close(ours)
            job.kill()


def is_full(pipe):
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder) > 60000
