"""A launcher ends when hvdrun is killed, and when it does not end although told to. Over hosts: tests/hosts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

from hvdlite.launch import guard, process

# A program that says its number and ignores what it is told, started by a process that is then killed or told.
PARENT = """
import sys
from hvdlite.launch import process
child = '''
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN if sys.argv[1] == "deaf" else signal.SIG_DFL)
print(os.getpid(), flush=True)
while True:
    signal.pause()
'''
sys.exit(process.run([sys.executable, "-c", child, sys.argv[1]], process.environment()))
"""


def test_a_program_ends_with_a_parent_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT, "willing"], stdout=subprocess.PIPE, text=True) as parent:
        program = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([program], [], [], 20)
        os.close(program)
    assert ended


def test_a_program_that_does_not_listen_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT, "deaf"], stdout=subprocess.PIPE, text=True) as parent:
        parent.stdout.readline()
        parent.terminate()
        assert parent.wait(timeout=30) == 128 + signal.SIGKILL


def test_a_program_that_ends_takes_its_guard_along():
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as program,
        guard.guarded(program.pid) as told,
    ):
        told()
        program.communicate(b"")
        told()  # too late, and harmless
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_signal_that_comes_before_the_guard_is_told_to_it(monkeypatch):
    # Lost, it left a deaf program running for ever: seen once on a busy machine.
    told = []

    @contextlib.contextmanager
    def slow(pid):
        os.kill(os.getpid(), signal.SIGTERM)
        yield lambda: told.append(pid)

    monkeypatch.setattr(guard, "guarded", slow)
    received: list[int] = []
    with process.started(["cat"], os.environ, received) as (child, _):
        assert child.wait(timeout=30) == -signal.SIGTERM
    for pipe in (child.stdin, child.stdout, child.stderr):
        pipe.close()
    assert (told, received) == ([child.pid], [signal.SIGTERM])
