"""Scripts that say which hosts there are: what they print, and what they do instead."""

from __future__ import annotations

import os
import subprocess

import pytest

from hvdlite.launch import process
from hvdlite.launch.elastic.discovery import Discovery, parse, read
from hvdlite.launch.hosts import parse_hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a:2\nb:3\n", "a:2,b:3"),
        ("b\n\n  a:1  \n", "b:4,a:1"),
        ("a:2\na:2\nb\na:2\n", "a:2,b:4"),
        ("a:2\na:3\n", "a:3"),
        ("a:0\nb:1\n", "b:1"),
        ("10.0.0.7:2", "10.0.0.7:2"),
    ],
)
def test_lines_are_hosts_with_or_without_slots(text, expected):
    assert parse(text, 4) == (parse_hosts(expected) if expected else ())


@pytest.mark.parametrize("line", ["a:b", "a b", "a:-1", ":2", "a,b:2", "n[1-3]:2", "a:²", "error: no such cluster"])
def test_other_lines_are_quoted(line):
    with pytest.raises(ValueError, match="expected lines such as node1 or node1:4, found '"):
        parse(f"a:2\n{line}\n", 1)


def ask(script: str, seconds: float = 20.0, over=lambda: False) -> process.Outcome:
    return process.probe(["sh", "-c", script], os.environ, seconds, over=over)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo a; echo no cloud >&2; exit 3", "ended with exit code 3 and said: no cloud"),
        ("no-such-discovery", "for one in this folder say ./no-such-discovery"),
        ("/dev/null", "Make it a program: chmod +x /dev/null"),
    ],
)
def test_a_script_that_fails_is_told_with_its_last_words(script, message):
    with pytest.raises(ValueError) as error:
        read(ask(script), script, 1)
    assert message in str(error.value)


def test_a_script_that_hangs_is_ended_with_what_it_started(tmp_path):
    pids = tmp_path / "pids"
    outcome = ask(f"sleep 600 & echo $! > {pids}; sleep 601", 0.5)
    with pytest.raises(ValueError, match="still running after 0.5 s, and was ended"):
        read(outcome, "hangs", 1)
    assert not runs(pids.read_text().strip())


def runs(pid: str) -> bool:
    """Return whether a process still runs; one that ended and waits for its parent does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_a_script_is_ended_with_the_job():
    assert ask("sleep 600", over=lambda: True).code is None


class Answers:
    """Answers in order; when they are used up the job is over."""

    def __init__(self, *answers: process.Outcome) -> None:
        self.left = list(answers)

    def __call__(self) -> process.Outcome:
        return self.left.pop(0) if self.left else process.Outcome(1, "", "over")

    def over(self) -> bool:
        return not self.left


def run(monkeypatch, *answers: process.Outcome) -> Discovery:
    monkeypatch.setattr("hvdlite.launch.elastic.discovery.EVERY", 0.0)
    source = Answers(*answers, process.Outcome(0, "last:1", ""))  # the job is over before this one counts
    discovery = Discovery(source, "hosts.sh", 1, source.over)
    discovery.start()
    discovery._thread.join(20)
    assert not discovery._thread.is_alive()
    return discovery


def test_the_first_answer_has_to_be_right(monkeypatch):
    discovery = run(monkeypatch, process.Outcome(4, "", "nothing"), process.Outcome(0, "a:1", ""))
    assert discovery.found is None
    assert "'hosts.sh' ended with exit code 4" in discovery.fault


def test_later_faults_are_told_once_and_the_last_answer_counts(monkeypatch):
    bad = process.Outcome(4, "", "nothing")
    discovery = run(monkeypatch, process.Outcome(0, "a:1", ""), bad, bad, process.Outcome(0, "a:2", ""), bad)
    assert discovery.found == parse_hosts("a:2")
    assert not discovery.fault
    (note,) = discovery.notes()
    assert "'hosts.sh' ended with exit code 4 and said: nothing" in note
    assert not discovery.notes()
