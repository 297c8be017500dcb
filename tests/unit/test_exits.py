"""How one process ends: what the watch says, and with which status it would end the others."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import os, sys, threading, contextlib
from hvdlite.exits import ExitWatch

def abort(code):
    print(f"abort({code})", flush=True)
    os._exit(99)

watch = ExitWatch(lambda: "rank 2 of 7", abort, lambda: print("normal end", flush=True))
watch.install()
"""


def run(body):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(body)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("body", "code", "cause"),
    [
        ("raise ValueError('no data')", 1, "ValueError: no data"),
        ("raise ValueError('two\\nlines')", 1, "ValueError: two"),
        ("raise ValueError", 1, "ValueError"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("assert False, 'broken'", 1, "AssertionError: broken"),
        ("sys.exit(3)", 3, "its program called sys.exit(3)"),
        ("sys.exit(-1)", 255, "its program called sys.exit(255)"),
        ("sys.exit('a reason')", 1, "its program called sys.exit(1)"),
        ("exit(4)", 4, "its program called sys.exit(4)"),
        ("quit(4)", 4, "its program called sys.exit(4)"),
        (
            "def main():\n    try:\n        sys.exit(5)\n    finally:\n        x = 1\nmain()",
            5,
            "its program called sys.exit(5)",
        ),
        ("try:\n    sys.exit(6)\nexcept SystemExit:\n    raise", 6, "its program called sys.exit(6)"),
        ("with contextlib.suppress(SystemExit):\n    sys.exit(1)\nsys.exit(7)", 7, "its program called sys.exit(7)"),
    ],
)
def test_a_failure_is_told_once_and_ends_the_job(body, code, cause):
    status, out, err = run(body)
    assert out == f"abort({code})\n"
    assert status == 99
    told = [line for line in err.splitlines() if line.startswith("hvdlite")]
    assert told == [f"hvdlite: rank 2 of 7 failed, so all ranks end now. Cause: {cause}"]
    assert "abort" not in err


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "sys.exit()",
        "sys.exit(0)",
        "exit()",
        "sys.exit(False)",
        "with contextlib.suppress(SystemExit):\n    sys.exit(3)",
        "try:\n    sys.exit('text')\nexcept SystemExit as error:\n    assert error.code == 'text'",
        "try:\n    sys.exit(3)\nexcept BaseException:\n    pass",
        "for _ in range(3):\n    try:\n        exit(9)\n    except SystemExit:\n        pass",
        "thread = threading.Thread(target=lambda: sys.exit(3))\nthread.start()\nthread.join()",
        "def f():\n    try:\n        sys.exit(3)\n    except SystemExit as error:\n        return str(error)\nf()",
    ],
)
def test_an_end_that_is_no_failure_is_silent(body):
    assert run(body) == (0, "normal end\n", "")


def test_the_traceback_and_the_programs_own_hook_come_first():
    _, _, err = run("raise ValueError('no data')")
    assert err.startswith("Traceback")
    assert err.index("ValueError: no data") < err.index("hvdlite: rank 2")
    body = PROGRAM.replace("watch = ", "sys.excepthook = lambda *a: print('my hook', file=sys.stderr)\nwatch = ")
    done = subprocess.run(
        [sys.executable, "-c", body + "raise ValueError"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.startswith("my hook\nhvdlite: rank 2 of 7 failed")


def test_what_was_printed_before_is_not_lost():
    status, out, _ = run("print('last words')\nsys.stdout.write('without newline')\nraise ValueError")
    assert out == "last words\nwithout newlineabort(1)\n"
    assert status == 99


def test_closed_streams_do_not_keep_a_failed_rank_alive():
    status, out, _ = run("sys.stderr.close()\nraise ValueError")
    assert status == 99
    assert out == "abort(1)\n"


def test_a_hook_of_the_program_that_fails_does_not_keep_a_failed_rank_alive():
    body = PROGRAM.replace("watch = ", "sys.excepthook = lambda *a: 1 / 0\nwatch = ")
    done = subprocess.run(
        [sys.executable, "-c", body + "raise ValueError('first')"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "abort(1)\n"
    assert "Cause: ValueError: first" in done.stderr


def test_where_abort_returns_the_program_still_ends():
    body = PROGRAM.replace("    os._exit(99)\n", "")
    done = subprocess.run(
        [sys.executable, "-c", body + "sys.exit(3)"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
