"""Running a program: exit codes, signals, messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hvdlite.errors import LaunchError
from hvdlite.launch import process

# Starts a child that says when it is up, and ends with 41 when the signal reaches it.
PARENT = """
import sys
from hvdlite.launch import process
child = '''
import os, signal, sys
signal.signal(int(sys.argv[1]), lambda number, frame: os._exit(41))
print("up", flush=True)
while True:
    signal.pause()
'''
sys.exit(process.run([sys.executable, "-c", child, sys.argv[1]], process.environment()))
"""


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_the_programs(code):
    assert process.run([sys.executable, "-c", f"raise SystemExit({code})"], os.environ) == code


def test_a_program_ended_by_a_signal_counts_as_in_a_shell():
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert process.run([sys.executable, "-c", killed], os.environ) == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_program(number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(int(number))], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(number)
        assert parent.wait(timeout=30) == 41


def test_ctrl_backslash_ends_the_program_as_sigterm_does():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(int(signal.SIGTERM))], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent:
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(signal.SIGQUIT)
        assert parent.wait(timeout=30) == 41


def test_the_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    process.run([sys.executable, "-c", ""], os.environ)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_missing_program_is_a_launch_error():
    with pytest.raises(LaunchError, match="/no/such/program cannot be run"):
        process.run(["/no/such/program"], os.environ)
    with pytest.raises(LaunchError, match="/no/such/program cannot be run"):
        process.ask(["/no/such/program"])


def test_a_missing_file_is_a_launch_error(tmp_path):
    with pytest.raises(LaunchError, match="cannot read .*hosts"):
        process.read_file(str(tmp_path / "hosts"))
