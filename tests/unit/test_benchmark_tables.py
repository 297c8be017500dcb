"""From figures to pages: tables stand between their markers, and every page has the markers that are written."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load():
    """Load a script of benchmarks/, whose folder is on the path when it runs."""
    sys.path.insert(0, str(BENCHMARKS))

    def loaded(name):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield loaded
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("tables", None)


def test_text_between_markers_is_replaced_and_nothing_else(load):
    put = load("tables").put
    page = (
        "a\n<!-- one: begin; how -->\nold\n<!-- one: end -->\nb\n<!-- one more: begin -->\n<!-- one more: end -->\nc\n"
    )
    once = put(page, "one", "new\n")
    assert once == page.replace("old", "new")
    assert put(once, "one more", "x") == once.replace("<!-- one more: begin -->\n", "<!-- one more: begin -->\nx\n")
    with pytest.raises(ValueError, match="two: begin"):
        put(page, "two", "x")


def test_every_page_has_the_markers_of_its_tables(load):
    report, tables = load("report"), load("tables")
    for page, name, _, _ in report.sections("today"):
        assert "|" in tables.put(page.read_text(), name, "| new |")


def test_tables_have_a_row_for_each_result_and_blanks_for_what_did_not_run(load):
    tables = load("tables")
    ratios = {"hvdlite": {"gloo": 4.0}, "shared": {"gloo": 20.0}}
    case = {"case": "c", "median_seconds": {"hvdlite": 1e-3, "shared": 2e-4, "gloo": 4e-3}, "times_as_fast_as": ratios}
    last = tables.allreduce({"results": [case]}).splitlines()[-1]
    assert last == "| c | 1000 |  | 4.00 | 200 |  | 20.0 |  | 4000 |"
    seconds = {"copy": 1.0, "sum": 1.0, "in place": 2.0, "private": 4.0, "in place, bytes alone": 1.0}
    last = tables.roofline({"results": [{"bytes": 2**30, "median_seconds": seconds}]}).splitlines()[-1]
    assert last == "| 1024 MiB | 2 | 3 | 1000000 | 2000000 | 50% |  | 4000000 |  |"
    rows = [
        {"ranks": n, "bandwidth": rate, "efficiency": 0.5, "hidden": 1.0} for rate in (3.125e9, 12.5e9) for n in (8, 64)
    ]
    found = {"results": rows, "step": {"spread": 0.031}}
    lines = tables.scale({"even": found, "odd": found}).splitlines()
    assert lines[0] == "| Ranks | 25 Gbit/s, even | 100 Gbit/s, even | 25 Gbit/s, odd | 100 Gbit/s, odd |"
    assert lines[2:] == [f"| {n} |{' 50% |' * 4}" for n in (8, 64)] + [
        "",
        "Computing varied by 3.1% while the step was recorded.",
    ]
