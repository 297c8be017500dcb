"""Sizes that change while ranks run, what is measured of them, and the file that one job leaves for the next."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.config import Config
from hvdlite.messages import Knobs
from hvdlite.tuning import store

KIB = 1024
DEFAULT = Knobs.of(Config())
OTHERS = [
    DEFAULT._replace(shared_memory_piece=64, ring_chunk=64, fusion_threshold=0),
    DEFAULT._replace(shared_memory_piece=2**30, ring_chunk=2**30, fusion_threshold=2**40, small_message=0),
    DEFAULT._replace(shared_memory_piece=3 * KIB, ring_chunk=1 * KIB, small_message=2**30, hierarchical=False),
    DEFAULT,
]


def retune(rank, knobs):
    """Let the next Verdict carry `knobs`, as a tuner would."""
    if rank == 0:
        runtime.current().engine_of(0)._coordinator.retune(knobs)


def now_in_use():
    return runtime.current().engine_of(0)._cycle.ways.knobs


def some_of_all(rank, size, step):
    """Run several kinds of operations, and return the results."""
    values = np.arange(10_003, dtype=np.float32) * np.float32(0.3) + rank
    tensors = [np.full(n, rank + n, np.float32) for n in (1, 0, 7_001, 5)]
    return [
        hvd.allreduce(values, op=hvd.Average, name="w"),
        hvd.allreduce(values.astype(np.float16), op=hvd.Sum, name="h"),
        *hvd.grouped_allreduce(tensors, op=hvd.Sum, name="g"),
        hvd.allgather(values[: 100 * (rank + 1)], name="gather"),
        hvd.broadcast(values, root_rank=step % size, name=f"b{step % size}"),
        hvd.reducescatter(values[: size * 501], op=hvd.Sum, name="scatter"),
        hvd.alltoall(values[: size * 301], name="alltoall"),
    ]


@pytest.mark.parametrize("hosts", ["one host", "two hosts"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("room", ["as the default has it", "for tuning"])
def test_results_are_right_with_any_sizes_and_on_all_ranks(on_ranks, monkeypatch, size, hosts, room):
    if room == "for tuning":
        monkeypatch.setenv("HVDLITE_AUTOTUNE_FILE", "there is none")
    names = ["a"] * size if hosts == "one host" else ["ab"[2 * rank // size] for rank in range(size)]

    def body(rank):
        before = [some_of_all(rank, size, step) for step in range(2)]
        results, used = [], []
        for knobs in OTHERS:
            retune(rank, knobs)
            results.append([some_of_all(rank, size, step) for step in range(2)])
            used.append(now_in_use())
        return before, results, used

    for before, results, used in on_ranks(size, body, hosts=names):
        assert used == OTHERS
        for one in results:
            for wanted, got in zip(before, one, strict=True):
                for a, b in zip(wanted, got, strict=True):
                    np.testing.assert_array_equal(a, b) if hosts == "one host" else np.testing.assert_allclose(
                        a, b, rtol=1e-6
                    )


def test_sizes_change_while_much_is_in_flight(on_ranks):
    def body(rank):
        sums = []
        for step in range(12):
            handles = [
                hvd.allreduce_async(np.full(5000, rank + i + step, np.float32), op=hvd.Sum, name=f"t{i}")
                for i in range(20)
            ]
            retune(rank, OTHERS[step % len(OTHERS)])
            sums += [float(hvd.synchronize(handle)[-1]) for handle in handles]
        return sums

    expected = [3.0 + 3 * (i + step) for step in range(12) for i in range(20)]
    assert on_ranks(3, body) == [expected] * 3


def test_tuning_settles_and_leaves_a_file_and_a_log(on_ranks, monkeypatch, tmp_path):
    file, log = tmp_path / "tuned.json", tmp_path / "log.csv"
    for name, value in {
        "HOROVOD_AUTOTUNE": "1", "HVDLITE_AUTOTUNE_FILE": file, "HOROVOD_AUTOTUNE_LOG": log,
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))

    def body(rank):
        wrong = 0
        for _ in range(400):
            tensors = [np.full(n, rank + 1, np.float32) for n in (200_000, 77, 150_000)]
            handles = [hvd.allreduce_async(t, op=hvd.Sum, name=f"t{i}") for i, t in enumerate(tensors)]
            wrong += sum(not (hvd.synchronize(handle) == 3).all() for handle in handles)
            if hvd.broadcast(np.array([file.exists()]), root_rank=0, name="done?")[0]:
                break
        hvd.barrier()  # the Verdict that brings the last change may come after "done?", but not after this
        return wrong, now_in_use()

    (wrong, knobs), (_, others) = on_ranks(2, body)
    assert wrong == 0
    assert knobs == others
    found = json.loads(file.read_text())
    assert Knobs(**found["knobs"]) == knobs
    assert found["step_bytes"] == 4 * (200_000 + 77 + 150_000) + 12 + 64  # each padded to 64 bytes, and "done?"
    rows = log.read_text().splitlines()
    assert rows[1].endswith("warm-up")
    assert rows[-1].endswith("best")
    assert len(rows) <= 1 + 1 + 20 + 1


def test_what_an_earlier_job_found_runs_on_all_ranks_but_for_what_the_user_sets(on_ranks, monkeypatch, tmp_path):
    def body(rank):
        hvd.allreduce(np.ones(3), name="x")
        return now_in_use(), runtime.current().topology

    (_, topology), _ = on_ranks(2, body)
    found = DEFAULT._replace(fusion_threshold=2**20, ring_chunk=12345)
    path = tmp_path / "tuned.json"
    store.save(str(path), store.fingerprint(topology), found, 0.1, 10**6)
    monkeypatch.setenv("HVDLITE_AUTOTUNE_FILE", str(path))
    assert [used for used, _ in on_ranks(2, body)] == [found] * 2
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", str(DEFAULT.fusion_threshold))
    assert [used for used, _ in on_ranks(2, body)] == [DEFAULT._replace(ring_chunk=12345)] * 2
    assert [used for used, _ in on_ranks(3, body)] == [DEFAULT] * 3  # it is not for three


# What is measured


def test_what_callers_wait_for_is_not_hidden(on_ranks):
    def body(rank):
        for _ in range(5):
            hvd.allreduce(np.ones(300_000, np.float32), name="x")
        hvd.barrier()
        return hvd.metrics()

    for found in on_ranks(2, body):
        (total,) = (one for kind, one in found["operations"].items() if kind == "allreduce")
        assert (total["batches"], total["tensors"], total["bytes"]) == (5, 5, 5 * 1_200_000)
        assert total["hidden_seconds"] == 0
        assert found["hidden_share"] == pytest.approx(0, abs=0.01)  # the barrier's few microseconds
        assert 0 < total["seconds"] <= found["communication_seconds"] <= found["waiting_seconds"] <= found["seconds"]
        assert found["waits"] == 6


def test_what_runs_while_nobody_waits_is_hidden(on_ranks):
    def body(rank):
        handles = [hvd.allreduce_async(np.ones(300_000, np.float32), name=f"x{i}") for i in range(3)]
        while not all(map(hvd.poll, handles)):
            pass
        for handle in handles:
            hvd.synchronize(handle)
        return hvd.metrics()

    for found in on_ranks(2, body):
        total = found["operations"]["allreduce"]
        assert total["tensors"] == 3
        assert total["seconds"] == total["hidden_seconds"] > 0
        assert (found["hidden_share"], found["waits"], found["waiting_seconds"]) == (1, 0, 0)


def test_sums_go_on_when_process_sets_come_and_go(on_ranks):
    def body(rank):
        for _ in range(3):
            one = hvd.add_process_set([0, 1])
            hvd.allreduce(np.ones(16, np.float32), name="x", process_set=one)
            hvd.remove_process_set(one)
        return hvd.metrics()["operations"]["allreduce"]["bytes"], len(runtime.current().metrics._ears)

    assert on_ranks(3, lambda rank: body(rank) if rank < 2 else others()) == [(192, 1)] * 2 + [None]


def others():
    """Take part in adding and removing a set of the others."""
    for _ in range(3):
        hvd.remove_process_set(hvd.add_process_set([0, 1]))


def test_before_anything_runs_all_is_hidden(on_ranks):
    (found,) = on_ranks(1, lambda rank: hvd.metrics())
    assert found["operations"] == {}
    assert found["hidden_share"] == 1


def test_rank_0_prints_one_line_at_the_end_when_asked(on_ranks, monkeypatch, capsys):
    def body(rank):
        hvd.allreduce(np.ones(250_000, np.float32), name="x")

    on_ranks(3, body)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("HVDLITE_SUMMARY", "1")
    on_ranks(3, body)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvdlite summary: 3 ranks, ")
    assert "; 1 tensor, 1 MB, in 1 collective; communication " in line
    assert "0 % of it hidden; callers waited " in line


def test_the_timeline_shows_who_waits(on_ranks, tmp_path):
    path = tmp_path / "t.json"

    def body(rank):
        hvd.start_timeline(path)
        for _ in range(3):
            hvd.allreduce(np.ones(3), name="x")
        hvd.stop_timeline()

    on_ranks(2, body)
    events = [e for e in json.loads(path.read_text()) if e.get("pid") == 0 and e.get("tid") == 1]
    assert events[0]["args"] == {"name": "callers wait"}
    assert [e["ph"] for e in events[1:]] == ["B", "E"] * 3
    assert [e["name"] for e in events[1::2]] == ["WAIT"] * 3
    moments = [e["ts"] for e in events[1:]]
    assert moments == sorted(moments)
