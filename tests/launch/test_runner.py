"""What runs on each rank in front of the program, by itself: what it tells, and that it ends as the program does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdlite import config
from hvdlite.launch import runner
from hvdlite.launch.frames import Frame, FrameReader

RUNNER = [sys.executable, "-I", "-S", runner.__file__]


def told(*arguments: str, **environ: str) -> tuple[int, dict[str, bytes]]:
    """Return the exit code of a runner that is rank 3, and what it has told of each kind."""
    done = subprocess.run(
        [*RUNNER, *arguments], env={**os.environ, "PMI_RANK": "3", **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=30,
    )  # fmt: skip
    assert done.stdout == b""
    kinds: dict[str, bytes] = {}
    for found in FrameReader().feed(done.stderr):
        assert isinstance(found, Frame) and found.rank == 3, found
        kinds[found.kind] = kinds.get(found.kind, b"") + found.data
    return done.returncode, kinds


def test_it_knows_the_same_variables_as_the_core():
    assert runner.RANK_VARIABLES == config._RANK_VARIABLES


def test_it_tells_both_streams_and_the_end():
    code = "import os, sys; os.write(1, b'a' * 100000); print('é', file=sys.stderr); sys.exit(5)"
    ended, kinds = told("--", sys.executable, "-c", code)
    assert ended == 5
    assert kinds["o"] == b"a" * 100000
    assert kinds["e"] == "é\n".encode()
    process, host = kinds["s"].decode().split(" ", 1)
    assert int(process) > 1 and host == os.uname().nodename
    assert kinds["x"].startswith(b"5 ") and kinds["x"].endswith(host.encode())


def test_it_tells_when_the_program_comes_to_init():
    code = "import os; from hvdlite import arrival\nwith arrival.told(os.environ): os._exit(0)"
    _, kinds = told("--", "sh", "-c", 'true; "$0" -c "$1"; exit', sys.executable, code)  # through a shell, too
    assert kinds["i"] == b"+"
    _, kinds = told("--", sys.executable, "-c", code.replace("os._exit(0)", "pass"))
    assert kinds["i"] == b"+-"


def test_a_rank_that_says_nothing_gives_signs_of_life(tmp_path):
    code, kinds = told("--files", str(tmp_path), "--width", "1", "--", "sleep", "2.3")
    assert code == 0
    assert kinds["b"]
    assert (tmp_path / "rank.3" / "stdout").read_bytes() == b""


def test_a_program_writes_line_by_line_and_newlines_stay():
    code = "import sys; print('a'); sys.stderr.write(str(sys.stdout.isatty())); sys.stdout.write('b\\r\\n')"
    _, kinds = told("--columns", "77", "--", sys.executable, "-c", code)
    assert kinds["o"] == b"a\nb\r\n"
    assert kinds["e"] == b"True"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_that_ends_the_program_ends_the_runner(number):
    code, kinds = told("--", sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})")
    assert code == -number
    assert kinds["x"].startswith(b"-%d " % number)


def test_a_missing_program_is_told():
    code, kinds = told("--", "/no/such/program")
    assert code == 127
    assert kinds["e"].startswith(b"hvdrun: '/no/such/program' cannot be run on ")
    assert kinds["x"].startswith(b"127 ")


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [("#!/no/such/interpreter\n", 127, b"whose interpreter (#!) is missing"), ("true\n", 127, b"needs a first line")],
)
def test_a_script_that_the_kernel_refuses_is_told_with_the_remedy(tmp_path, text, code, hint):
    (tmp_path / "script").write_text(text)
    (tmp_path / "script").chmod(0o755)
    ended, kinds = told("--", str(tmp_path / "script"))
    assert ended == code
    assert hint in kinds["e"]


def test_with_files_only_the_end_of_a_failure_is_told(tmp_path):
    command = ["sh", "-c", "seq 10000; echo bad >&2; exit 2"]
    code, kinds = told("--files", f"{tmp_path}/a b", "--width", "2", "--", *command)
    assert (code, sorted(kinds)) == (2, ["s", "t", "x"])
    assert kinds["t"].endswith(b"9999\n10000\nbad\n") or kinds["t"].endswith(b"10000\n")
    assert (tmp_path / "a b/rank.03/stdout").read_text().splitlines() == [str(n) for n in range(1, 10001)]
    assert (tmp_path / "a b/rank.03/stderr").read_text() == "bad\n"


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    code, kinds = told("--files", f"{tmp_path}/file", "--width", "1", "--", "true")
    assert code == 1
    assert kinds["e"].startswith(b"hvdrun: cannot write output on ")


def test_a_disk_that_is_full_ends_no_program(tmp_path):
    (tmp_path / "rank.3").mkdir()
    (tmp_path / "rank.3" / "stdout").symlink_to("/dev/full")
    command = ["sh", "-c", "echo 1; sleep 0.2; echo 2; echo 3 >&2; exit 4"]
    code, kinds = told("--files", str(tmp_path), "--width", "1", "--", *command)
    assert code == 4
    assert kinds["e"].count(b"hvdrun: cannot write output on ") == 1 and b"No space left" in kinds["e"]
    assert b"2\n" in kinds["t"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_program_does_not_outlive_it(number, tmp_path):
    # As launchers do it: SIGTERM for the group, SIGKILL for the process that was started.
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"
    command = [*RUNNER, "--", sys.executable, "-c", code, str(tmp_path / "pid")]
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    with started:
        pid = wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        os.killpg(started.pid, number) if number == signal.SIGTERM else started.kill()
        assert started.wait(timeout=30) == -number
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text())


@pytest.mark.parametrize("deaf", [False, True])
def test_without_its_launcher_it_ends_the_program(tmp_path, deaf):
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(100)"
    if deaf:
        code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {code}"
    launcher = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True, stderr=-3).wait()"
    command = [*RUNNER, "--", sys.executable, "-c", code, str(tmp_path / "pid")]
    started = subprocess.Popen([sys.executable, "-c", launcher, *command], stdin=subprocess.DEVNULL)
    pid = wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    started.kill()
    started.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text())


def wait_for(look):
    """Return what `look()` finds once it finds something."""
    end = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_nothing_is_lost_that_a_program_has_written_when_it_ends():
    # The launcher is slow: it reads first long after the program's end, when 60 KB are still in its pipe.
    code = "import os; os.write(2, b'a' * 60000); os.write(2, b'the end')"
    started = subprocess.Popen(
        [*RUNNER, "--", sys.executable, "-c", code], env={**os.environ, "PMI_RANK": "3"}, stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert started.stderr is not None
    with started:
        said, reader = b"", FrameReader()
        for _ in range(1000):
            time.sleep(0.03)  # for each 4 KB
            data = os.read(started.stderr.fileno(), 4096)
            said += b"".join(found.data for found in reader.feed(data) if found.kind == "e")
            if not data:
                break
    assert said == b"a" * 60000 + b"the end"


def test_a_program_ends_though_its_children_write_on():
    code, kinds = told("--", "sh", "-c", "yes & echo done; exit 3")
    assert code == 3 and b"done\n" in kinds["o"]
    code, kinds = told("--", "sh", "-c", "(for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.1; done) & exit 4")
    assert code == 4 and b"9" not in kinds["o"]
