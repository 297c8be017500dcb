"""The timeline of running engines: what is in the file, and when."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import runtime


class File:
    """What a timeline says."""

    def __init__(self, path):
        self.events = json.loads(path.read_text())
        self.pids = {
            e["args"]["name"]: e["pid"] for e in self.events if e.get("name") == "process_name" and e["pid"]
        }  # fmt: skip

    def of(self, name):
        """Return what happened to a tensor: `B name`, `E`, `X rank`."""
        return [f"{e['ph']} {e.get('name', '')}".strip() for e in self.all_of(name)]

    def all_of(self, name):
        return [e for e in self.events if e.get("pid") == self.pids[name] and e["ph"] != "M"]

    @property
    def n_cycles(self):
        return sum(e.get("name") == "CYCLE_START" for e in self.events)

    def check_balance(self):
        for pid in self.pids.values():
            moments, depth = 0, 0
            for event in self.events:
                if event.get("pid") == pid and event["ph"] in "BEX":
                    depth += {"B": 1, "E": -1, "X": 0}[event["ph"]]
                    assert 0 <= depth <= 2
                    assert event["ts"] >= moments
                    moments = event["ts"]
            assert depth == 0


BACKENDS = {1: "LOCAL", 2: "SHARED_MEMORY", 3: "SHARED_MEMORY"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_allreduce_is_there_as_soon_as_the_timeline_is_stopped(on_ranks, tmp_path, size):
    path = tmp_path / "t.json"

    def body(rank):
        hvd.start_timeline(path, mark_cycles=True)
        hvd.barrier()
        for _ in range(3):
            hvd.allreduce(np.full((3, 5), rank, np.float32), name="w")
        hvd.stop_timeline()
        return File(path).of("w") if rank == 0 else None

    told = on_ranks(size, body)[0]
    backend = BACKENDS[size]
    for n in range(3):
        one = told[n * (6 + size) : (n + 1) * (6 + size)]
        assert one[0] == "B NEGOTIATE_ALLREDUCE"
        assert sorted(one[1 : 1 + size]) == [f"X {rank}" for rank in range(size)]
        assert one[1 + size :] == ["E", "B ALLREDUCE", f"B {backend}_ALLREDUCE", "E", "E"]
    file = File(path)
    assert len(told) == 3 * (6 + size)
    assert file.all_of("w")[-1]["args"] == {"dtype": "float32", "shape": "[3, 5]"}
    assert file.n_cycles >= 3
    file.check_balance()


KINDS = {
    "allreduce": (lambda rank, name: hvd.allreduce(np.ones((2, 3)), name=name), "[2, 3]"),
    "allgather": (lambda rank, name: hvd.allgather(np.ones((rank + 1, 2), np.int16), name=name), "[6, 2]"),
    "broadcast": (lambda rank, name: hvd.broadcast(np.ones(0, np.float16), 2, name=name), "[0]"),
    "alltoall": (lambda rank, name: hvd.alltoall(np.ones((rank + 2, 2)), [1, 0, rank + 1], name=name), "[3, 2]"),
    "reducescatter": (lambda rank, name: hvd.reducescatter(np.ones((7, 1)), name=name), "[3, 1]"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_tells_its_activity_and_the_shape_of_the_result(on_ranks, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HVDLITE_BACKEND", "ring")
    monkeypatch.setenv("HVDLITE_TIMELINE", str(tmp_path / "t.json"))
    call, shape = KINDS[kind]
    on_ranks(3, lambda rank: call(rank, "w"))
    file = File(tmp_path / "t.json")
    assert file.of("w")[0] == f"B NEGOTIATE_{kind.upper()}"
    executed = ["E", f"B {kind.upper()}", f"B RING_{kind.upper()}", "E", "E"]
    if kind == "allgather":
        executed[2:2] = ["B ALLOCATE_OUTPUT", "E"]
    assert file.of("w")[4:] == executed
    assert file.all_of("w")[-1]["args"]["shape"] == shape
    assert file.n_cycles == 0


def test_every_rank_may_have_a_file_with_its_own_view(on_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "t-{rank}.json"))
    on_ranks(3, lambda rank: hvd.allreduce(np.ones(5), name="w"))
    for rank, heard in ((0, 3), (1, 1), (2, 1)):
        file = File(tmp_path / f"t-{rank}.json")
        assert sum(e["ph"] == "X" for e in file.events) == heard
        assert f"X {rank}" in file.of("w")
        assert file.of("w")[-5:] == ["E", "B ALLREDUCE", "B SHARED_MEMORY_ALLREDUCE", "E", "E"]
        assert file.events[0]["args"]["rank"] == rank


def test_fused_tensors_are_told_one_by_one(on_ranks, tmp_path):
    def body(rank):
        hvd.start_timeline(tmp_path / "t.json")
        hvd.barrier()
        hvd.grouped_allreduce([np.full(i, float(rank)) for i in range(5)], name="g")
        hvd.stop_timeline()

    on_ranks(2, body)
    file = File(tmp_path / "t.json")
    members = [name for name in file.pids if not name.startswith("barrier")]
    assert len(members) == 5
    assert len({e["ts"] for name in members for e in file.all_of(name) if e.get("name") == "ALLREDUCE"}) == 1
    shapes = [file.all_of(name)[-1]["args"]["shape"] for name in members]
    assert shapes == ["[0]", "[1]", "[2]", "[3]", "[4]"]
    file.check_balance()


def test_what_fails_is_an_error_and_the_next_call_is_none(on_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDLITE_TIMELINE", str(tmp_path / "t.json"))

    def body(rank):
        with pytest.raises(hvd.MismatchError):
            hvd.allreduce(np.ones(2 + rank), name="w")
        with pytest.raises((hvd.InvalidRequestError, hvd.RemoteError)):  # rank 0 itself is wrong
            hvd.allreduce(np.ones(2, object if rank == 0 else float), name="v")
        hvd.allreduce(np.ones(2), name="w")
        hvd.allreduce(np.ones(2), name="v")

    on_ranks(2, body)
    file = File(tmp_path / "t.json")
    for name in ("w", "v"):
        told = file.of(name)
        assert told[0] == "B NEGOTIATE_ALLREDUCE"
        assert told.count("B ERROR") == 1
        assert told.index("B ERROR") < told.index("B ALLREDUCE")
    error = next(e for e in file.all_of("w") if e.get("name") == "ERROR")
    assert "[2] on rank 0; [3] on rank 1" in error["args"]["error"]
    file.check_balance()


def test_what_is_in_flight_at_shutdown_ends(on_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDLITE_TIMELINE", str(tmp_path / "t.json"))

    over = threading.Event()

    def body(rank):
        if rank == 1:
            assert over.wait(10)
            return None
        handle = hvd.allreduce_async(np.ones(3), name="w")
        hvd.shutdown()
        over.set()
        with pytest.raises(hvd.ShutdownError):
            hvd.synchronize(handle)
        return File(tmp_path / "t.json").of("w")

    assert on_ranks(2, body)[0] == ["B NEGOTIATE_ALLREDUCE", "X 0", "E"]


def test_the_timeline_goes_on_after_shutdown_and_init(on_ranks, tmp_path):
    def body(rank):
        hvd.start_timeline(tmp_path / "t.json")
        for step in range(3):
            hvd.allreduce(np.ones(3), name=f"w{step}")
            hvd.shutdown()
            if rank == 0:
                File(tmp_path / "t.json").check_balance()  # complete
            hvd.init()

    on_ranks(2, body)
    file = File(tmp_path / "t.json")
    assert all(file.of(f"w{step}")[-1] == "E" for step in range(3))


def test_equal_names_in_process_sets_are_told_apart(on_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDLITE_TIMELINE", str(tmp_path / "t.json"))

    def body(rank):
        evens, odds = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
        mine = odds if rank % 2 else evens
        handles = [hvd.allreduce_async(np.full(3, rank), op=hvd.Sum, name="w", process_set=s)
                   for s in (mine, hvd.global_process_set)]  # fmt: skip
        return [int(hvd.synchronize(handle)[0]) for handle in handles]

    assert on_ranks(4, body) == [[2, 6], [4, 6]] * 2
    file = File(tmp_path / "t.json")
    file.check_balance()
    assert {name for name in file.pids if name.startswith("w")} == {"w", "w [process set 1, ranks 0, 2]"}
    within = file.of("w [process set 1, ranks 0, 2]")
    assert sorted(within[1:3]) == ["X 0", "X 2"]
    assert len(within) == 8
    assert len(file.of("w")) == 10


@pytest.mark.parametrize("name", ['quote " back \\', "two\nlines", "größe 梯度 \U0001f600", "\ud800", "null\x00"])
def test_any_name_gives_a_valid_file(on_ranks, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HVDLITE_TIMELINE", str(tmp_path / "t.json"))
    on_ranks(2, lambda rank: hvd.allreduce(np.ones(2), name=name))
    assert len(File(tmp_path / "t.json").of(name)) == 8


def test_join_and_barrier_show_who_came_when(on_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDLITE_TIMELINE", str(tmp_path / "t.json"))

    def body(rank):
        hvd.barrier()
        if rank == 1:
            hvd.allreduce(np.ones(3), name="w")
        hvd.join()

    on_ranks(2, body)
    file = File(tmp_path / "t.json")
    file.check_balance()
    assert file.of("w") == ["B NEGOTIATE_ALLREDUCE", "X 1", *file.of("w")[2:]]
    starts = Counter(e["name"] for e in file.events if e["ph"] == "B")
    assert starts["NEGOTIATE_BARRIER"] == starts["NEGOTIATE_JOIN"] == starts["ALLREDUCE"] == 1
    assert "BARRIER" not in starts
    assert "JOIN" not in starts


def test_files_change_while_operations_fly(on_ranks, tmp_path):
    n_files, over = 12, threading.Event()

    def switch():
        for i in range(n_files):
            hvd.start_timeline(tmp_path / f"{i}.json", mark_cycles=bool(i % 2))
            hvd.allreduce(np.ones(3), name=f"switch {i}")
            if i % 3 == 0:
                hvd.stop_timeline()

    def body(rank):
        if rank == 0:
            switch()
            over.set()
        else:
            for i in range(n_files):
                hvd.allreduce(np.ones(3), name=f"switch {i}")
        for step in itertools.count():
            done = hvd.allreduce(np.full(100, float(rank == 0 and over.is_set())), op=hvd.Sum, name="last")
            if done[0]:
                return step
        return None

    on_ranks(2, body)
    for i in range(n_files):
        file = File(tmp_path / f"{i}.json")
        assert file.of(f"switch {i}")[-2:] == ["E", "E"]


def test_threads_may_start_and_stop_at_the_same_time(on_ranks, tmp_path):
    def body(rank):
        handles = [hvd.allreduce_async(np.ones(50), name=f"w{i}") for i in range(50)]
        running = runtime.current()

        def turn(i):
            for j in range(5):
                running.timeline.start(str(tmp_path / f"{(i + j) % 3}.json"), False)
                running.timeline.stop()

        threads = [threading.Thread(target=turn, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for handle in handles:
            hvd.synchronize(handle)
        for thread in threads:
            thread.join()
        return running.timeline.recording is None

    assert on_ranks(2, body) == [True, True]
    for i in range(3):
        File(tmp_path / f"{i}.json")


@pytest.mark.parametrize("wrong", ["", None, 3, b"bytes", "nul\0"])
def test_what_is_no_file_name_is_refused(on_ranks, wrong):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError, match=r"start_timeline\(file_path=.*expected the name of a file"):
            hvd.start_timeline(wrong)

    on_ranks(1, body)
