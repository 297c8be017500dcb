"""The timeline's parts: the file that is valid after every write, the events, the queue that never blocks."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading

import pytest

from hvdlite.config import Config
from hvdlite.dtypes import ReduceOp
from hvdlite.messages import Kind, Refusal, Request, Response
from hvdlite.observe import log, timeline, trace_file
from hvdlite.observe.instrument import Instrument, LastReasons, Operation
from hvdlite.observe.timeline import Timeline
from hvdlite.observe.trace import Place, Trace
from hvdlite.observe.trace_file import TraceFile

WORLD = Place("", (0, 1, 2), 0)


@pytest.fixture
def warnings(monkeypatch):
    texts = []
    monkeypatch.setattr(log.get_logger(), "warning", lambda text, *arguments: texts.append(text % arguments))
    return texts


@pytest.fixture
def recorder():
    """A Timeline of rank 0, which is ended after the test."""
    made = Timeline()
    made.attach(0, Config())
    yield made
    made.close()


def request(name, kind=Kind.ALLREDUCE, **more):
    return Request(kind, name, "float32", (17, 23), **more)


def response(name, kind=Kind.ALLREDUCE, shape=(17, 23), **more):
    return Response(kind, name, "float32", shape, **more)


def ran(responses, received=0):
    return Operation(responses[0].kind, responses, 1, "because", 0.0, received)


def events_of(trace):
    return [json.loads(line) for line in trace.take()]


def shape_of(events, pid):
    """Return what happens to one tensor: `B name`, `E`, `X rank`."""
    return [f"{e['ph']} {e.get('name', '')}".strip() for e in events if e.get("pid") == pid and e["ph"] != "M"]


# The file


def test_the_file_is_valid_json_after_every_write(tmp_path):
    path = tmp_path / "t.json"
    file = TraceFile(str(path))
    expected = []
    for n in (1, 3, 0, 1, 200):
        new = [{"name": f"{len(expected)}.{i}", "long": "é" * 50 * i} for i in range(n)]
        file.append([json.dumps(event) for event in new])
        expected += new
        assert json.loads(path.read_text()) == expected
    file.close()
    assert json.loads(path.read_text()) == expected


def test_a_file_that_exists_is_emptied(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("x" * 1000)
    TraceFile(str(path)).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("n_before", [0, 1, 2])
@pytest.mark.parametrize("n_fit", [0, 1, 7])
def test_a_full_disc_leaves_what_was_there(tmp_path, monkeypatch, n_before, n_fit):
    path = tmp_path / "t.json"
    file = TraceFile(str(path))
    before = [{"name": str(i)} for i in range(n_before)]
    for event in before:
        file.append([json.dumps(event)])
    real, calls = os.pwrite, itertools.count()

    def full(fd, data, at):
        call = next(calls)
        if call == 0:
            return real(fd, data[:n_fit], at)
        if call == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(trace_file.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        file.append(['{"name":"does not fit"}'])
    file.close()
    assert json.loads(path.read_text() or "[]") == before


def test_a_pipe_gets_the_bracket_at_the_end(tmp_path):
    path, text = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: text.append(path.read_text()))
    reader.start()
    file = TraceFile(str(path))
    for i in range(3):
        file.append([json.dumps({"n": i})])
    file.close()
    reader.join(10)
    assert json.loads(text[0]) == [{"n": 0}, {"n": 1}, {"n": 2}]


# The events


def test_a_tensor_is_negotiated_by_each_rank_then_executed():
    trace = Trace(100.0, 123456, 0)
    for rank, moment in ((2, 101.0), (0, 101.25), (1, 103.5)):  # exact in binary
        trace.heard(moment, WORLD, rank, [request("w")])
    trace.answered(104.0, WORLD, [response("w")], False)
    trace.began(105.0, WORLD, [response("w")])
    trace.activity(106.0, WORLD, "RING_ALLREDUCE")
    trace.ran(107.5, WORLD, ran([response("w")]))
    events = events_of(trace)
    assert events[0]["args"] == {"start_time_since_epoch_in_micros": 123456, "rank": 0}
    assert {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "w"}} in events
    assert {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}} in events
    assert shape_of(events, 1) == [
        "B NEGOTIATE_ALLREDUCE", "X 2", "X 0", "X 1", "E", "B ALLREDUCE", "B RING_ALLREDUCE", "E", "E",
    ]  # fmt: skip
    spans = [e for e in events if e["ph"] != "M"]
    assert [e["ts"] / 1e6 for e in spans] == [1.0, 1.0, 1.25, 3.5, 4.0, 5.0, 6.0, 7.5, 7.5]
    assert all(type(e["ts"]) is int and "tid" not in e and "cat" not in e for e in spans)
    assert [e["dur"] for e in spans if e["ph"] == "X"] == [0, 0, 0]
    assert spans[-1]["args"] == {"dtype": "float32", "shape": "[17, 23]"}
    assert [e for e in spans if e["ph"] == "E" and "name" in e] == []


def test_fused_tensors_each_get_every_activity():
    trace, both = Trace(0.0, 0, 0), [response("a"), response("b")]
    trace.began(1.0, WORLD, both)
    trace.activity(1.1, WORLD, "ALLOCATE_OUTPUT")
    trace.activity(1.2, WORLD, "TREE_ALLREDUCE")
    trace.ran(1.3, WORLD, ran(both))
    events = events_of(trace)
    for pid in (1, 2):
        assert shape_of(events, pid) == [
            "B ALLREDUCE", "B ALLOCATE_OUTPUT", "E", "B TREE_ALLREDUCE", "E", "E",
        ]  # fmt: skip


@pytest.mark.parametrize("kind", [Kind.BARRIER, Kind.JOIN])
def test_what_moves_nothing_is_only_negotiated(kind):
    trace = Trace(0.0, 0, 0)
    trace.heard(1.0, WORLD, 1, [Request(kind, "b")])
    trace.answered(1.1, WORLD, [Response(kind, "b")], False)
    trace.began(1.2, WORLD, [Response(kind, "b")])
    trace.ran(1.3, WORLD, ran([Response(kind, "b")]))
    assert shape_of(events_of(trace), 1) == [f"B NEGOTIATE_{kind.name}", "X 1", "E"]


def test_a_refusal_is_an_error_that_says_why():
    trace, refusal = Trace(0.0, 0, 0), Refusal("mismatch", "w", "dtype", {'"f4"\n': [0], "f8": [1]})
    trace.heard(1.0, WORLD, 0, [request("w")])
    trace.answered(1.1, WORLD, [response("w", refusal=refusal)], False)
    events = events_of(trace)
    assert shape_of(events, 1) == ["B NEGOTIATE_ALLREDUCE", "X 0", "E", "B ERROR", "E"]
    assert "tensor 'w' between ranks: \"f4\"\n on rank 0" in events[-2]["args"]["error"]


def test_adasum_has_its_own_name():
    trace = Trace(0.0, 0, 0)
    trace.heard(1.0, WORLD, 0, [request("w", op=ReduceOp.ADASUM)])
    trace.answered(1.1, WORLD, [response("w", op=ReduceOp.ADASUM)], False)
    trace.began(1.2, WORLD, [response("w", op=ReduceOp.ADASUM)])
    assert shape_of(events_of(trace), 1) == ["B NEGOTIATE_ADASUM", "X 0", "E", "B ADASUM"]


@pytest.mark.parametrize(
    ("result", "set_rank", "shape"),
    [
        (response("w", Kind.ALLGATHER, (5, 3), sizes=(5, 0, 7)), 0, "[12, 3]"),
        (response("w", Kind.ALLTOALL, (5, 3)), 0, "[9, 3]"),
        (response("w", Kind.REDUCESCATTER, (7, 3)), 0, "[3, 3]"),
        (response("w", Kind.REDUCESCATTER, (7, 3)), 2, "[2, 3]"),
        (response("w", Kind.REDUCESCATTER, (1,)), 1, "[0]"),
        (response("w", Kind.BROADCAST, ()), 1, "[]"),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Response) else str(value),
)
def test_the_shape_is_that_of_the_result(result, set_rank, shape):
    trace, place = Trace(0.0, 0, 0), Place("", (0, 1, 2), set_rank)
    trace.began(1.0, place, [result])
    trace.ran(1.1, place, ran([result], received=9))
    assert events_of(trace)[-1]["args"]["shape"] == shape


NAMES = ['quote " and \\', "two\nlines\ttab\x00", "größe 梯度 \U0001f600", "\ud800 half", "", "{rank}%s{}"]


def test_any_name_survives():
    trace = Trace(0.0, 0, 0)
    for name in NAMES:
        trace.heard(1.0, WORLD, 0, [request(name)])
    shown = [e["args"]["name"] for e in events_of(trace) if e["name"] == "process_name" and e["pid"]]
    assert shown == NAMES


def test_equal_names_in_two_process_sets_are_two_tensors():
    trace, other = Trace(0.0, 0, 0), Place("process set 1, ranks 0, 2", (0, 2), 0)
    trace.heard(1.0, WORLD, 0, [request("w")])
    trace.heard(1.1, other, 1, [request("w")])
    trace.answered(1.2, WORLD, [response("w")], False)
    events = events_of(trace)
    assert shape_of(events, 1) == ["B NEGOTIATE_ALLREDUCE", "X 0", "E"]
    assert shape_of(events, 2) == ["B NEGOTIATE_ALLREDUCE", "X 2"]  # the rank among all ranks
    names = [e["args"]["name"] for e in events if e.get("name") == "process_name" and e["pid"]]
    assert names == ["w", "w [process set 1, ranks 0, 2]"]


def test_a_cycle_is_marked_only_when_asked_for():
    trace = Trace(0.0, 0, 0)
    events_of(trace)
    trace.answered(1.0, WORLD, [], False)
    trace.answered(2.0, WORLD, [], True)
    assert events_of(trace) == [{"ph": "i", "name": "CYCLE_START", "ts": 2000000, "s": "g"}]


STEP = ["heard", "answered", "began", "activity", "ran"]


@pytest.mark.parametrize("missing", [set(c) for n in (1, 2) for c in itertools.combinations(STEP, n)], ids=str)
def test_spans_stay_balanced_whatever_report_is_missing(missing):
    trace = Trace(0.0, 0, 0)
    for step in range(3):
        for place, name in itertools.product((WORLD, Place("process set 1", (0,), 0)), "ab"):
            it, skip = [response(name)], missing if step == 1 else ()
            for report, arguments in zip(
                STEP, [(0, [request(name)]), (it, False), (it,), ("RING_ALLREDUCE",), (ran(it),)], strict=True
            ):
                if report not in skip:
                    getattr(trace, report)(1.0 + step, place, *arguments)
    events = events_of(trace)
    for pid in range(1, 5):
        depth = 0
        for event in events:
            if event.get("pid") == pid:
                depth += {"B": 1, "E": -1}.get(event["ph"], 0)
                assert 0 <= depth <= 2
        assert depth == 0


@pytest.mark.parametrize(
    "end", [lambda trace: trace.ended(2.0, WORLD), lambda trace: trace.dropped(2.0, 5), lambda trace: trace.finish(2.0)]
)
def test_what_is_open_is_closed_when_reports_end(end):
    trace = Trace(0.0, 0, 0)
    trace.heard(1.0, WORLD, 0, [request("negotiated")])
    trace.began(1.0, WORLD, [response("executed")])
    trace.activity(1.0, WORLD, "RING_ALLREDUCE")
    end(trace)
    trace.ran(3.0, WORLD, ran([response("executed")]))  # too late
    events = events_of(trace)
    assert shape_of(events, 1) == ["B NEGOTIATE_ALLREDUCE", "X 0", "E"]
    assert shape_of(events, 2) == ["B ALLREDUCE", "B RING_ALLREDUCE", "E", "E"]
    assert not [e for e in events if e["ph"] == "E" and "args" in e]


# Start and stop


def tell(ear, name):
    ear.heard(0, [request(name)])
    ear.answered([response(name)])


def tensors_in(path):
    events = json.loads(path.read_text())
    return [e["args"]["name"] for e in events if e.get("name") == "process_name" and e["pid"]]


def test_each_file_has_what_was_told_while_it_was_recorded(recorder, tmp_path):
    ear = recorder.ear_of("", (0,), 0, Instrument())
    tell(ear, "before")
    for name in ("one", "two"):
        recorder.start(str(tmp_path / name), False)
        tell(ear, name)
    recorder.stop()
    tell(ear, "after")
    recorder.start(str(tmp_path / "three"), False)
    recorder.stop()
    assert tensors_in(tmp_path / "one") == ["one"]
    assert tensors_in(tmp_path / "two") == ["two"]
    assert tensors_in(tmp_path / "three") == []


@pytest.mark.parametrize("end", ["stop", "another file", "exit"])
def test_what_is_in_flight_at_the_end_of_a_file_is_closed_there(recorder, tmp_path, end):
    recorder.start(str(tmp_path / "t"), False)
    ear = recorder.ear_of("", (0,), 0, Instrument())
    ear.heard(0, [request("negotiated"), request("executed")])
    ear.answered([response("executed")])
    ear.began([response("executed")])
    ear.activity("RING_ALLREDUCE")
    ends = {"stop": recorder.stop, "exit": recorder.close}
    ends.get(end, lambda: recorder.start(str(tmp_path / "other"), False))()
    ear.operation(ran([response("executed")]))
    recorder.stop()
    events = json.loads((tmp_path / "t").read_text())
    assert shape_of(events, 1) == ["B NEGOTIATE_ALLREDUCE", "X 0", "E"]
    assert shape_of(events, 2)[-4:] == ["B ALLREDUCE", "B RING_ALLREDUCE", "E", "E"]
    if end == "another file":
        assert [e for e in json.loads((tmp_path / "other").read_text()) if e["ph"] in "BE"] == []


def test_the_same_file_again_goes_on_and_may_mark_cycles(recorder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ear = recorder.ear_of("", (0,), 0, Instrument())
    recorder.start("t", False)
    tell(ear, "first")
    recorder.start(str(tmp_path / "t"), True)
    tell(ear, "second")
    recorder.stop()
    assert tensors_in(tmp_path / "t") == ["first", "second"]
    assert (tmp_path / "t").read_text().count("CYCLE_START") == 1


def test_flush_puts_everything_into_a_file_that_goes_on(recorder, tmp_path):
    recorder.start(str(tmp_path / "t"), False)
    ear = recorder.ear_of("", (0,), 0, Instrument())
    for i in range(3):
        tell(ear, str(i))
        recorder.flush()
        assert tensors_in(tmp_path / "t") == [str(j) for j in range(i + 1)]


@pytest.mark.parametrize(("path", "written"), [("t", {0: "t"}), ("t{rank}", {0: "t0", 1: "t1", 12: "t12"})])
def test_rank_0_writes_or_every_rank_a_file_of_its_own(tmp_path, path, written):
    for rank in (0, 1, 12):
        one = Timeline()
        one.attach(rank, Config(timeline=str(tmp_path / path)))
        assert (one.recording is not None) == (rank in written)
        one.close()
    assert sorted(os.listdir(tmp_path)) == sorted(written.values())


@pytest.mark.parametrize("setting", ["", "DYNAMIC"])
def test_nothing_is_recorded_unless_asked_for(setting):
    one = Timeline()
    one.attach(0, Config(timeline=setting))
    assert one.recording is None


def test_the_next_init_neither_empties_the_file_nor_starts_what_was_stopped(tmp_path):
    config, one = Config(timeline=str(tmp_path / "t")), Timeline()
    one.attach(0, config)
    ear = one.ear_of("", (0,), 0, Instrument())
    tell(ear, "first")
    one.attach(0, config)
    tell(ear, "second")
    one.stop()
    one.attach(0, config)
    assert one.recording is None
    assert tensors_in(tmp_path / "t") == ["first", "second"]


def test_stopping_what_does_not_run_is_logged(recorder, monkeypatch):
    texts = []
    monkeypatch.setattr(log.get_logger(), "info", texts.append)
    recorder.stop()
    assert texts == ["hvd.stop_timeline(): no timeline is being recorded."]


def test_an_ear_passes_operations_on(recorder):
    reasons = LastReasons()
    recorder.ear_of("", (0,), 0, reasons).operation(ran([response("w")]))
    assert reasons.by_kind == {"allreduce": "because"}


# When it cannot be written


@pytest.mark.parametrize("path", ["missing/t.json", ".", "/dev/full"])
def test_a_path_that_cannot_be_written_warns_once(recorder, tmp_path, monkeypatch, warnings, path):
    monkeypatch.chdir(tmp_path)
    recorder.start(path, False)
    ear = recorder.ear_of("", (0,), 0, Instrument())
    for i in range(100):
        tell(ear, str(i))
        if i % 30 == 0:
            recorder.flush()
    recorder.stop()
    assert len(warnings) == 1
    assert repr(os.path.abspath(path)) in warnings[0]
    assert "training goes on" in warnings[0]


def test_a_path_that_cannot_be_written_warns_once_for_all_inits(tmp_path, warnings):
    one = Timeline()
    for _ in range(3):
        one.attach(0, Config(timeline=str(tmp_path / "missing" / "t")))
        one.flush()
    one.close()
    assert len(warnings) == 1


def test_after_an_error_the_same_file_can_be_started_again(recorder, tmp_path, warnings):
    path = tmp_path / "later" / "t"
    recorder.start(str(path), False)
    recorder.flush()
    path.parent.mkdir()
    recorder.start(str(path), False)
    tell(recorder.ear_of("", (0,), 0, Instrument()), "w")
    recorder.stop()
    assert tensors_in(path) == ["w"]
    assert len(warnings) == 1


def test_a_disc_that_hangs_costs_bounded_memory_and_no_time(recorder, tmp_path, monkeypatch, warnings):
    monkeypatch.setattr(timeline, "_ROOM", 6)
    at_work, goes_on, real = threading.Event(), threading.Event(), TraceFile.append

    def append(file, events):
        at_work.set()
        assert goes_on.wait(10)
        real(file, events)

    monkeypatch.setattr(TraceFile, "append", append)
    recorder.start(str(tmp_path / "t"), False)
    assert at_work.wait(10)
    ear = recorder.ear_of("", (0,), 0, Instrument())
    for i in range(50):
        tell(ear, f"lost {i}" if i >= 3 else str(i))
    goes_on.set()
    recorder.flush()
    tell(ear, "found")
    recorder.stop()
    events = json.loads((tmp_path / "t").read_text())
    assert tensors_in(tmp_path / "t") == ["0", "1", "2", "found"]
    assert [e["args"]["reports"] for e in events if e.get("name") == "DROPPED"] == [94]
    assert len(warnings) == 1
    assert "too slow" in warnings[0]


def test_stopping_does_not_wait_for_ever_for_a_reader_that_never_comes(recorder, tmp_path, monkeypatch, warnings):
    monkeypatch.setattr(timeline, "_PATIENCE", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    recorder.start(str(path), False)
    recorder.stop()
    assert "its end may be missing" in warnings[0]
    path.read_bytes()  # lets the writer go
