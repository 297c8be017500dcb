"""The tuner on a made-up machine with a clock of its own: steps, samples, wishes, and what it writes."""

from __future__ import annotations

import json

import pytest

from hvdlite.config import Config
from hvdlite.messages import Kind, Knobs, Response
from hvdlite.observe.instrument import Operation
from hvdlite.topology import Topology
from hvdlite.tuning import store
from hvdlite.tuning.search import Search
from hvdlite.tuning.tuner import Tuner

MIB = 2**20
DEFAULT = Knobs(64 * MIB, MIB, MIB // 2, 16 * 1024)
FAST = DEFAULT._replace(fusion_threshold=4 * MIB)
GRID = {"fusion_threshold": [MIB, 4 * MIB]}
CONFIG = Config(autotune=True, autotune_warmup_samples=1, autotune_steps_per_sample=3)


class Training:
    """Engine and training in one: runs steps at a speed that depends on the knobs, and does as the tuner wishes."""

    def __init__(self, config=CONFIG, grid=GRID, found=None):
        self.now, self.knobs, self.settled, self.sizes, self.changes = 0.0, DEFAULT, [], [], []
        self.tuner = Tuner(DEFAULT, config, self.search_for, found, lambda *result: self.settled.append(result))
        self.grid = grid

    def search_for(self, step_bytes):
        self.sizes.append(step_bytes)
        return Search(DEFAULT, self.grid, 40)

    def operation(self, *names, seconds=1.0, nbytes=1000, kind=Kind.ALLREDUCE):
        started = self.now
        self.now += seconds
        self.tuner.operation(Operation(kind, [Response(kind, name) for name in names], nbytes, "", started))
        wish = self.tuner.take_wish()
        if wish is not None:
            self.knobs = wish
            self.changes.append(wish)

    def step(self, names="ab", seconds=None, nbytes=1000):
        for name in names:
            self.operation(name, seconds=seconds or (0.5 if self.knobs == FAST else 1.0), nbytes=nbytes)


def test_it_finds_the_faster_size_and_keeps_it():
    training = Training()
    for _ in range(500):
        training.step()
    assert training.knobs == FAST
    assert training.settled == [(FAST, pytest.approx(1.0), 2000)]
    assert training.tuner.settled
    n_changes = len(training.changes)
    for _ in range(100):
        training.step("xyz")
    assert len(training.changes) == n_changes


def test_fused_and_single_operations_make_the_same_step():
    training = Training()
    for n in range(500):
        if n % 2:
            training.operation("a", "b", nbytes=2000, seconds=2 * (0.5 if training.knobs == FAST else 1.0))
        else:
            training.step()
    assert training.settled == [(FAST, pytest.approx(1.0), 2000)]


def test_without_a_better_size_the_default_runs_in_the_end():
    training = Training()
    for _ in range(500):
        training.step(seconds=1.0)
    assert training.settled == [(DEFAULT, 0.0, 2000)]
    assert training.knobs == DEFAULT
    assert set(training.changes) == {DEFAULT, DEFAULT._replace(fusion_threshold=MIB), FAST}


def test_steps_of_another_content_are_not_measured():
    """Evaluation, a metric now and then, a checkpoint: they take long, and count for nothing."""
    training = Training()
    for n in range(900):
        training.step()
        if n % 4 == 0:
            training.step("abm", seconds=50.0)
    assert training.settled == [(FAST, pytest.approx(1.0), 2000)]


def test_it_starts_over_when_training_goes_on_with_another_model():
    training = Training()
    for _ in range(20):
        training.step()
    assert training.sizes == [2000]
    for _ in range(600):
        training.step("xyz", nbytes=500)
    assert training.sizes == [2000, 1500]
    assert training.settled == [(FAST, pytest.approx(1.0), 1500)]


def test_names_that_never_repeat_are_no_steps():
    training = Training()
    for n in range(3000):
        training.operation(f"fresh.{n}")
        training.operation("allreduce.noname.7")
    assert not training.changes
    assert not training.sizes


def test_operations_that_move_nothing_are_no_part_of_a_step():
    training = Training()
    for n in range(600):
        training.step()
        training.operation("barrier.noname.1" if n % 2 else "pause", nbytes=0, kind=Kind.BARRIER, seconds=0.001)
    assert training.settled[0][0] == FAST


def test_memory_is_bounded_without_steps():
    training = Training()
    for n in range(100_100):
        training.operation(f"fresh.{n}")
    assert len(training.tuner._names) <= 100_001


def test_what_was_found_before_is_used_at_once_and_nothing_is_measured():
    training = Training(found=FAST)
    training.operation("a")
    assert training.changes == [FAST]
    for _ in range(500):
        training.step()
    assert not training.sizes
    assert training.changes == [FAST]


def test_the_log_has_every_sample_and_the_result_last(tmp_path):
    path = tmp_path / "log.csv"
    training = Training(Config(autotune_log=str(path), autotune_warmup_samples=2, autotune_steps_per_sample=3))
    for _ in range(500):
        training.step()
    head, *rows = [line.split(",") for line in path.read_text().splitlines()]
    assert head == [*Knobs._fields, "step_bytes", "bytes_per_second", "what"]
    assert [row[-1] for row in rows[:3]] == ["warm-up", "warm-up", "sample"]
    assert rows[-1] == [str(int(value)) for value in FAST] + ["2000", "", "best"]
    speeds = {row[0]: row[-2] for row in rows[:-1]}
    assert speeds == {str(64 * MIB): "1000", str(MIB): "1000", str(4 * MIB): "2000"}


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    training = Training(Config(autotune_log=str(tmp_path / "no" / "log.csv"), autotune_steps_per_sample=3))
    for _ in range(500):
        training.step()
    assert training.settled[0][0] == FAST
    assert len(caplog.records) == 1
    assert "HVDLITE_AUTOTUNE_LOG" in caplog.text


# The file for the next job

HERE = store.fingerprint(Topology(1, ("b", "a", "b")))


def test_what_was_saved_is_loaded(tmp_path):
    path = str(tmp_path / "tuned.json")
    assert store.load(path, HERE) is None
    found = FAST._replace(hierarchical=False)
    store.save(path, HERE, found, 0.25, 2000)
    assert store.load(path, HERE) == found
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.json"]


def test_hosts_may_have_other_names_and_ranks_may_not_be_spread_otherwise():
    assert store.fingerprint(Topology(0, ("x", "y", "x"))) == HERE
    assert store.fingerprint(Topology(0, ("x", "x", "x"))) != HERE


def test_a_file_of_another_topology_is_refused_with_a_warning(tmp_path, caplog):
    path = str(tmp_path / "tuned.json")
    store.save(path, store.fingerprint(Topology(0, ("a", "a"))), FAST, 0.25, 2000)
    assert store.load(path, HERE) is None
    assert "ranks: 2 there, 3 here; ranks_per_host: [2] there, [1, 2] here" in caplog.text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"format": 1}', '{"format": 2, "valid_for": {}, "knobs": {}}', "\x00"]
    + [
        json.dumps({"format": 1, "valid_for": HERE, "knobs": {**FAST._asdict(), **wrong}})
        for wrong in ({"ring_chunk": 0}, {"fusion_threshold": -1}, {"small_message": "1"}, {"more": 1},
                      {"hierarchical": 1}, {"shared_memory_piece": True})
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused_with_a_warning(tmp_path, caplog, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    assert store.load(str(path), HERE) is None
    assert "it is ignored" in caplog.text


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    store.save(str(tmp_path / "no" / "tuned.json"), HERE, FAST, 0.25, 2000)
    assert "is not saved" in caplog.text
