"""The log: nothing at import, one line per record on stderr, other people's handlers respected."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys

import pytest

from hvdlite.config import Config
from hvdlite.observe import log


@pytest.fixture(autouse=True)
def untouched_logger():
    yield
    log.unconfigure()
    log.get_logger().setLevel(logging.NOTSET)


def test_a_line_carries_rank_and_text(capsys):
    log.configure(1, Config(log_hide_time=True))
    log.get_logger().warning("tensor %r waits", "w")
    assert capsys.readouterr().err == "WARNING hvdlite[rank 1]: tensor 'w' waits\n"


def test_the_time_comes_first_unless_hidden(capsys):
    log.configure(0, Config())
    log.get_logger().error("no")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ERROR hvdlite\[rank 0\]: no\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("level", "seen"), [("trace", "TDIWE"), ("debug", "DIWE"), ("info", "IWE"), ("warning", "WE"), ("fatal", "")]
)
def test_the_level_comes_from_the_config(capsys, level, seen):
    log.configure(0, Config(log_level=level))
    logger = log.get_logger()
    for number, letter in [(log.TRACE, "T"), (10, "D"), (20, "I"), (30, "W"), (40, "E")]:
        logger.log(number, letter)
    assert "".join(line[-1] for line in capsys.readouterr().err.splitlines()) == seen


def test_configuring_again_replaces_the_rank(capsys):
    log.configure(0, Config(log_hide_time=True))
    log.configure(2, Config(log_hide_time=True))
    log.get_logger().warning("once")
    assert capsys.readouterr().err == "WARNING hvdlite[rank 2]: once\n"


def test_handlers_of_the_program_are_kept_and_used_instead(capsys):
    theirs = logging.StreamHandler(io.StringIO())
    log.get_logger().addHandler(theirs)
    try:
        log.configure(0, Config())
        log.get_logger().warning("theirs")
    finally:
        log.get_logger().removeHandler(theirs)
    assert theirs.stream.getvalue() == "theirs\n"
    assert capsys.readouterr().err == ""


def test_importing_sets_nothing_up():
    code = "import logging; before = logging.getLogger('hvdlite').__dict__.copy(); import hvdlite.observe.log; "
    code += "now = logging.getLogger('hvdlite').__dict__; assert before == now, now; assert not logging.root.handlers"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
