"""`hvdlite.run()`: a function on ranks, from scripts with and without a guard, from a notebook, and when it fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

import hvdlite as hvd
from hvdlite.errors import InvalidRequestError, LaunchError, RankFailedError
from hvdlite.launch import function

# No guard: a rank that ran this script would start ranks in turn. `Point` and `train` exist only here.
SCRIPT = """
import os, sys
import numpy as np
import hvdlite as hvd
import neighbour  # a module next to the script

class Point:
    def __init__(self, x): self.x = x

base = 10.5
def train(start, *, step, point):
    hvd.init()
    total = hvd.allreduce(np.arange(5.0) * hvd.size() + hvd.rank(), op=hvd.Sum)
    return hvd.rank(), total + base, neighbour.double(start + step), Point(point.x + hvd.rank()), os.environ["MINE"]

results = hvd.run(train, (1,), {"step": 2, "point": Point(7)}, np=3, env={"MINE": "a =b"})
assert [result[0] for result in results] == [0, 1, 2]
for rank, total, doubled, point, mine in results:
    assert total.tolist() == (np.arange(5.0) * 9 + 3 + base).tolist()
    assert (doubled, type(point), point.x, mine) == (6, Point, 7 + rank, "a =b")
assert hvd.run(lambda: os.getpid()) != [os.getpid()]
print("right")
"""

FAILURES = """
import os, signal, threading, time
import hvdlite as hvd

def attempt(func, **more):
    try:
        print("returned", hvd.run(func, np=2, **more))
    except hvd.RankFailedError as error:
        print("==", error.rank, type(error.__cause__).__name__, str(error).replace(chr(10), "|"))
    except hvd.LaunchError as error:
        print("==", type(error).__name__, error)

def rank():
    from hvdlite.config import launcher_rank
    return launcher_rank()

class Bread(Exception):
    pass

def raises():
    if rank() == 1:
        raise Bread("none left")
    time.sleep(100)

def dies():
    if rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)

def gives_a_lock():
    return threading.Lock() if rank() == 1 else 0

if __name__ == "__main__":
    attempt(raises)
    attempt(dies)
    attempt(gives_a_lock)
    attempt(lambda: time.sleep(100), timeout=2)
"""

WAITS = """
import os, sys, time
import hvdlite as hvd

def wait(folder):
    hvd.init()
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(100)

hvd.run(wait, (sys.argv[1],), np=2)
"""


def interpret(code: str, **names):
    """Run code as the cell of a notebook: `__main__` is not a file."""
    space = {"__name__": "__main__", **names}
    exec(code, space)
    return space


@pytest.mark.mpi
def test_a_script_without_a_guard_gets_the_results_in_rank_order(mpi, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("def double(x): return 2 * x\n")
    done = mpi.run_alone(tmp_path / "script.py").check()
    assert done.out == "right\n"


@pytest.mark.mpi
def test_the_example_of_the_page_runs(openmpi, tmp_path):
    page = (Path(__file__).parents[2] / "docs/launching.md").read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "hvd.run(" in code]
    (tmp_path / "example.py").write_text(example)
    done = openmpi.run_alone(tmp_path / "example.py").check()
    assert done.out == "[0.5, 0.5]\n"


@pytest.mark.mpi
def test_a_failure_on_a_rank_is_raised_here_and_ends_the_others(mpi, tmp_path):
    (tmp_path / "script.py").write_text(FAILURES)
    done = mpi.run_alone(tmp_path / "script.py", timeout=90).check()
    told = [line for line in done.out.splitlines() if line.startswith(("== ", "returned"))]
    assert len(told) == 4, done.out + done.err
    raised, died, lock, late = told
    assert raised.startswith("== 1 Bread raises() failed on rank 1 of 2: ")
    assert "Bread: none left||Traceback" in raised
    assert re.search(r'File "[^"]*/script.py", line \d+, in raises\|', raised)
    assert died.startswith("== ") and "gave no result, and the job ended with exit code " in died
    assert lock.startswith(
        "== 1 NoneType gives_a_lock() failed on rank 1 of 2: the result of gives_a_lock(), of type lock"
    )
    assert "cannot be pickled: TypeError: cannot pickle '_thread.lock' object" in lock
    assert "still ran after 2 s on ranks 0, 1. All ranks have been ended." in late


@pytest.mark.mpi
def test_ctrl_c_ends_the_ranks(mpi, tmp_path):
    (tmp_path / "script.py").write_text(WAITS)
    (tmp_path / "pids").mkdir()
    command = [str(mpi.python), str(tmp_path / "script.py"), str(tmp_path / "pids")]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        pids = until(lambda: sorted(path.name for path in (tmp_path / "pids").iterdir()), 2, script)
        script.send_signal(signal.SIGINT)
        said, _ = script.communicate(timeout=30)
    finally:
        script.kill()
    assert script.returncode != 0
    assert "KeyboardInterrupt" in said
    assert not [pid for pid in pids if runs(pid)]


def until(look, wanted: int, script: subprocess.Popen[str]) -> list[str]:
    """Return what `look()` finds once it has that many entries."""
    end = time.monotonic() + 60
    while len(found := look()) < wanted:
        assert time.monotonic() < end and script.poll() is None, script.communicate()
        time.sleep(0.05)
    return found


def runs(pid: str) -> bool:
    """Return whether a process runs; a killed one may stay listed where nobody collects it."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.mpi
def test_a_notebook_sees_what_ranks_print_and_may_call_from_a_thread(openmpi, capsys):
    code = "def f():\n    print('printed', flush=True)\n    return 1\nresults = hvd.run(f, np=2)"
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(interpret(code, hvd=hvd)["results"]))
    thread.start()
    thread.join(60)
    assert found == [[1, 1]]
    assert capsys.readouterr().out.count("printed") == 2


def test_what_cannot_be_sent_is_told_before_anything_starts():
    with pytest.raises(LaunchError, match=r"run\(3\): expected a function, found int"):
        hvd.run(3)
    with pytest.raises(LaunchError, match=r"len\(\) and its arguments cannot be sent to the ranks: TypeError"):
        hvd.run(len, (threading.Lock(),))
    with pytest.raises(InvalidRequestError, match=r"num_proc=2, np=3.*Give one of them"):
        hvd.run(len, num_proc=2, np=3)
    for ranks in (0, -1, 1.5):
        with pytest.raises(LaunchError, match="expected a whole number of ranks"):
            hvd.run(len, num_proc=ranks)
    with pytest.raises(LaunchError, match="give one of them"):
        hvd.run(len, hosts="a:1", hostfile="b")
    with pytest.raises(LaunchError, match="cannot make a directory in '/no/such/place'"):
        hvd.run(len, directory="/no/such/place")


def test_what_hvdrun_refuses_is_told_in_its_words(tmp_path):
    words = r"no rank of len\(\) was started: -np: 2 ranks on nowhere:1, which take 1\. Ask for fewer"
    with pytest.raises(LaunchError, match=words):
        hvd.run(len, np=2, hosts="nowhere:1", directory=str(tmp_path))


def test_a_rank_starts_no_ranks(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(LaunchError, match=r"this process is a rank itself \(PMI_SIZE=4\)"):
        hvd.run(len)


def test_a_host_that_does_not_see_the_directory_says_so(openmpi, tmp_path):
    done = openmpi.run_alone("-m", "hvdlite.launch.on_rank", tmp_path / "elsewhere")
    assert done.code != 0
    assert f"does not see {tmp_path}/elsewhere" in done.err and "directory=..." in done.err


@pytest.mark.parametrize(
    ("start", "options"),
    [
        (function.Start(), ["-np", "1"]),
        (function.Start(ranks=3), ["-np", "3"]),
        (function.Start(hosts="a:2,b:2"), ["-H", "a:2,b:2"]),
        (function.Start(ranks=3, hostfile="hosts"), ["-np", "3", "--hostfile", "hosts"]),
        (function.Start(env={"A": "b c"}, mpi_args="--mca x y"), ["-np", "1", "-x", "A=b c", "--mpi-args=--mca x y"]),
        (function.Start(verbose=True, executable="/py"), ["-np", "1", "--verbose"]),
    ],
)
def test_the_ranks_are_started_by_hvdrun(start, options):
    command = function.command_for(start, "/dir")
    assert command[1:3] == ["-m", "hvdlite.launch"]
    assert command[3 : 4 + len(options)] == ["--no-label", *options]
    assert command[4 + len(options) :] == [start.executable or command[0], "-m", "hvdlite.launch.on_rank", "/dir"]


def test_the_first_rank_to_fail_is_named():
    call = function.Call(os.getpid)
    answers = {rank: function.Answer(3, at, what=f"E{rank}") for rank, at in ((0, 7.0), (2, 5.0))}
    with pytest.raises(RankFailedError, match=r"getpid\(\) failed on rank 2 of 3: E2"):
        function.results_of(call, answers, 3, 1)
    answer = function.Answer(2, 1.0, result=b"I1\n.")
    with pytest.raises(RankFailedError, match="rank 1 of 2 gave no result, and the job ended with exit code 9"):
        function.results_of(call, {0: answer}, None, 9)
    with pytest.raises(RankFailedError, match="every rank gave its result, and the job ended with exit code 9"):
        function.results_of(call, {0: answer, 1: answer}, None, 9)
    assert function.results_of(call, {0: answer, 1: answer}, None, 0) == [1, 1]
