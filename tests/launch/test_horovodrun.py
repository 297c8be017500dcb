"""Options of horovodrun and its YAML file: what they set, which has precedence, and what has no effect."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hvdlite.launch import cli, horovodrun

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILE = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5
  cache_capacity: 7
  hierarchical_allreduce: false
autotune:
  enabled: true
  log_file: a b.csv
timeline:
  filename: t.json
  mark_cycles: true
stall_check:
  enabled: false
  shutdown_time_seconds: 90
library_options:
  thread_affinity: [0, 2]
logging:
  level: INFO
  hide_timestamps: true
"""


@pytest.fixture
def settings(monkeypatch, capsys):
    """`settings(*options)` returns the settings that hvdrun hands to the ranks, and what it says."""
    monkeypatch.setattr(cli.process, "ask", lambda argv: "HYDRA build details:")

    def settings(*options: str) -> tuple[dict[str, str], str]:
        seen: list[str] = []
        monkeypatch.setattr(cli.process, "run", lambda command, environ, **more: seen.extend(command) or 0)
        assert cli.main(["-np", "2", "--raw", *options, "true"]) == 0
        pairs = zip(seen, seen[1:], seen[2:], strict=False)
        return {name: value for genv, name, value in pairs if genv == "-genv"}, capsys.readouterr().err

    return settings


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--fusion-threshold-mb", "0.5"], {"FUSION_THRESHOLD": "524288"}),
        (["--cache-capacity", "0"], {"CACHE_CAPACITY": "0"}),
        (["--hierarchical-allreduce"], {"HIERARCHICAL": "1"}),
        (["--no-hierarchical-allreduce"], {"HIERARCHICAL": "0"}),
        (["--timeline-filename", "t", "--timeline-mark-cycles"], {"TIMELINE": "t", "TIMELINE_MARK_CYCLES": "1"}),
        (["--no-timeline-mark-cycles"], {"TIMELINE_MARK_CYCLES": "0"}),
        (["--no-stall-check", "--stall-check-warning-time-seconds", "5"], {"STALL_WARNING": "0"}),
        (["--stall-check", "--stall-check-warning-time-seconds", "5"], {"STALL_WARNING": "5"}),
        (["--stall-check-shutdown-time-seconds", "90"], {"STALL_SHUTDOWN": "90"}),
        (["--thread-affinity", "0,2"], {"THREAD_AFFINITY": "0,2"}),
        (["--log-level", "DEBUG"], {"LOG_LEVEL": "DEBUG"}),
        (["--log-without-timestamp"], {"LOG_HIDE_TIME": "1"}),
        (["--log-hide-timestamp"], {"LOG_HIDE_TIME": "1"}),
        (["--log-with-timestamp"], {"LOG_HIDE_TIME": "0"}),
        (["--no-log-hide-timestamp"], {"LOG_HIDE_TIME": "0"}),
        (["--autotune", "--autotune-log-file", "a b"], {"AUTOTUNE": "1", "AUTOTUNE_LOG": "a b"}),
        (["--autotune", "--autotune-warmup-samples=1"], {"AUTOTUNE": "1", "AUTOTUNE_WARMUP_SAMPLES": "1"}),
        (["--autotune-warmup-samples=1"], {}),  # as horovodrun does it
        (["--no-autotune"], {"AUTOTUNE": "0"}),
        (["-x", "HVDLITE_CACHE_CAPACITY=9", "--cache-capacity", "1"], {"CACHE_CAPACITY": "9"}),
        ([], {}),
    ],
)
def test_an_option_is_a_setting_of_the_ranks(settings, options, expected):
    assert settings(*options)[0] == {f"HVDLITE_{name}": value for name, value in expected.items()}


@pytest.mark.parametrize("option", horovodrun.WITHOUT_EFFECT)
def test_an_option_without_effect_is_taken_and_told_in_one_line(settings, option):
    takes_value, why = horovodrun.WITHOUT_EFFECT[option]
    found, said = settings(option, *(["3"] if takes_value else []))
    assert not found
    assert said.splitlines() == [f"hvdrun: {option} has no effect: {why}"]


@pytest.mark.parametrize("option", horovodrun.INSTEAD)
def test_an_option_that_is_refused_says_what_to_do(option, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["-np", "2", option, "3", "true"])
    assert end.value.code == cli.CANNOT_START
    assert f"{option} is " in capsys.readouterr().err


def test_a_file_says_the_same_as_options(settings, tmp_path):
    (tmp_path / "c.yaml").write_text(FILE)
    found, said = settings("--config-file", str(tmp_path / "c.yaml"))
    assert found == {
        "HVDLITE_FUSION_THRESHOLD": str(32 * 2**20), "HVDLITE_CACHE_CAPACITY": "7", "HVDLITE_HIERARCHICAL": "0",
        "HVDLITE_AUTOTUNE": "1", "HVDLITE_AUTOTUNE_LOG": "a b.csv", "HVDLITE_TIMELINE": "t.json",
        "HVDLITE_TIMELINE_MARK_CYCLES": "1", "HVDLITE_STALL_WARNING": "0", "HVDLITE_STALL_SHUTDOWN": "90",
        "HVDLITE_THREAD_AFFINITY": "0,2", "HVDLITE_LOG_LEVEL": "INFO",
    }  # fmt: skip
    assert "controller: gloo has no effect" in said
    assert "params.cycle_time_ms has no effect: nothing waits for a cycle" in said
    assert "logging.hide_timestamps is not a key and changes nothing. Did you mean logging.hide_timestamp?" in said
    assert len(said.splitlines()) == 3


@pytest.mark.parametrize("after", [False, True])
def test_an_option_beats_the_file_wherever_it_stands(settings, tmp_path, after):
    (tmp_path / "c.yaml").write_text(FILE)
    file = ["--config-file", str(tmp_path / "c.yaml")]
    options = [
        "--cache-capacity",
        "3",
        "--hierarchical-allreduce",
        "--no-autotune",
        "--stall-check",
        "--log-level=error",
    ]
    found, _ = settings(*(file + options if after else options + file))
    assert found["HVDLITE_CACHE_CAPACITY"] == "3"
    assert found["HVDLITE_HIERARCHICAL"] == "1"
    assert found["HVDLITE_AUTOTUNE"] == "0"
    assert found["HVDLITE_LOG_LEVEL"] == "error"
    assert not {"HVDLITE_STALL_WARNING", "HVDLITE_AUTOTUNE_LOG"} & found.keys()


def test_an_empty_file_says_nothing(settings, tmp_path):
    (tmp_path / "c.yaml").write_text("params:\n")
    assert settings("--config-file", str(tmp_path / "c.yaml")) == ({}, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: [", "not YAML"),
        ("- a", "expected sections such as params:"),
        ("controller: tcp", "controller: expected mpi, gloo or jsrun, found 'tcp'"),
        ("autotune: {enabled: 3}", "autotune.enabled: expected true or false, found 3"),
        ("params: {cache_capacity: -1}", "--cache-capacity: expected whole number, 0 or more, found '-1'"),
        ("stall_check: {enabled: 3}\ntimeline: {mark_cycles: x}", "2 faults in this job:"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(tmp_path, capsys, text, message):
    (tmp_path / "c.yaml").write_text(text)
    assert cli.main(["-np", "1", "--config-file", str(tmp_path / "c.yaml"), "true"]) == cli.CANNOT_START
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) <= 3


def test_without_pyyaml_the_remedy_is_told(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.yaml").write_text(FILE)
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert cli.main(["-np", "1", "--config-file", str(tmp_path / "c.yaml"), "true"]) == cli.CANNOT_START
    assert "pip install 'hvdlite[yaml]'" in capsys.readouterr().err


def test_every_option_is_on_the_page_and_every_setting_exists():
    settings, page = (DOCS / "reference/settings.md").read_text(), (DOCS / "migrating.md").read_text()
    for option, one in horovodrun.SETTINGS.items():
        assert f"`{one.variable}`" in settings
        assert f"`{option}" in page, option
    for option in [*horovodrun.WITHOUT_EFFECT, *horovodrun.INSTEAD]:
        assert re.search(rf"`{option}\b", page) or horovodrun.INSTEAD.get(option) == "say -np N", option
