"""What the command line of `hvdlite.bench` understands, and what it prints numbers as."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvdlite.bench import __main__ as command
from hvdlite.bench import output, units
from hvdlite.bench import step as steps
from hvdlite.bench.operations import COLLECTIVES, DTYPES, Case, bus_factor
from hvdlite.bench.table import render
from hvdlite.bench.turns import Alone, take_turns, times


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("512", [512]),
        ("1K,3m", [1024, 3 * 2**20]),
        ("1K:64M:x4", [1024 * 4**k for k in range(9)]),
        ("1:10:+4", [1, 5, 9]),
        ("8:8:x2,1.5KiB", [8, 1536]),
    ],
)
def test_sizes_are_lists_and_ranges(text, numbers):
    assert units.parse_series(text) == numbers


@pytest.mark.parametrize("text", ["", "x", "1K:2K", "1:8:x1", "0:8:x2", "1:8:*2", "-1", "1:8:+0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError):
        units.parse_series(text)


def test_rates_count_in_thousands_and_times_have_units():
    assert units.parse_rate("25 Gbit/s") == units.parse_rate("25Gbps") == 25e9 / 8
    assert units.parse_rate("1.2 GB/s") == 1.2e9
    assert units.parse_time("15 us") == pytest.approx(15e-6)
    for wrong in ("25", "fast", "0 Gbit/s"):
        with pytest.raises(ValueError):
            units.parse_rate(wrong)


def test_numbers_are_shown_with_their_units():
    assert [units.show_bytes(n) for n in (17, 1024, 3 * 2**19, 2**30)] == ["17 B", "1 KiB", "1.5 MiB", "1 GiB"]
    assert [units.show_time(t) for t in (1.5e-6, 0.25, 2.0)] == ["1.5 µs", "250 ms", "2 s"]
    assert units.show_rate(25e9 / 8) == "25 Gbit/s"


def test_a_table_is_aligned():
    assert render(["a", "bb"], [("long", 1)]) == "a     bb\nlong   1"


def test_bus_bandwidth_counts_what_a_link_must_carry():
    assert bus_factor("allreduce", 4) == 1.5
    assert bus_factor("allgather", 4) == bus_factor("alltoall", 4) == bus_factor("reducescatter", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3])
def test_hvdlite_computes_what_a_case_expects(on_ranks, collective, dtype, size):
    def body(rank):
        case = Case(collective, 1000, dtype, rank, size, tensors="numpy", memory="private")
        run = case.contender("hvdlite")
        for _ in range(2):  # the second time the values were overwritten
            case.fill("hvdlite")
            run()
            case.check("hvdlite")
        return case.nbytes

    assert on_ranks(size, body) == [-(-1000 // DTYPES[dtype].itemsize // size) * size * DTYPES[dtype].itemsize] * size


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_wrong_element_is_found_and_named(on_ranks, collective):
    def body(rank):
        case = Case(collective, 64, "int32", rank, 2, tensors="numpy", memory="private")
        run = case.contender("hvdlite")
        case.fill("hvdlite")
        run()
        case.expected[3] += 1
        with pytest.raises(RuntimeError, match=f"hvdlite: {collective} of 64 bytes of int32 is wrong on rank {rank}"):
            case.check("hvdlite")

    on_ranks(2, body)


def test_contenders_take_turns_and_the_warm_up_does_not_count():
    order = []
    contenders = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = take_turns(contenders, 4, Alone(), turns=2, after_turn=lambda name: order.append(f"{name} checked"))
    assert order == [*["a"] * 5, "a checked", *["b"] * 5, "b checked"] * 2
    assert [len(values) for values in seconds.values()] == [4, 4]


def test_a_tenth_is_below_p10_and_above_p90():
    found = times([float(n) for n in range(101)])
    assert found == (50.0, 10.0, 90.0)
    assert times([2.0]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce", "--dtypes", "float31"], "'float31' is unknown"),
        (["allreduce", "--vs", "nccl"], "'nccl' is unknown"),
        (["allreduce", "--backends", "fast"], "'fast' is unknown"),
        (["scale", "no such file"], "No such file"),
    ],
)
def test_what_cannot_be_done_ends_with_2_and_a_reason(capsys, arguments, message):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    assert command.main(["allreduce", "--plot", "x.png"]) == 2
    assert "pip install 'hvdlite[bench]'" in capsys.readouterr().err


def test_scale_prints_and_writes_a_row_for_each_rate_and_number_of_ranks(capsys, tmp_path):
    step, figures = tmp_path / "step.json", tmp_path / "out.json"
    steps.write(steps.even_step("made up", 0.1, [2**22] * 10), step)
    assert command.main(["scale", str(step), "--ranks", "8:4096:x8", "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "links of 25 Gbit/s" in shown
    assert "links of 100 Gbit/s" in shown
    rows = json.loads(figures.read_text())["results"]
    assert [row["ranks"] for row in rows] == [8, 64, 512, 4096] * 2
    assert all(0 < row["efficiency"] <= 1 for row in rows)
    assert np.all([f"{row['efficiency']:.1%}" in shown for row in rows])
