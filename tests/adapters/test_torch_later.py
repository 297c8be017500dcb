"""Names that do not exist are told as Python tells them; what is not there yet is in the README."""

from __future__ import annotations

from pathlib import Path

import pytest

import hvdlite.torch as hvd

README = Path(__file__).resolve().parents[2] / "README.md"


def test_an_unknown_name_is_told_as_python_does():
    with pytest.raises(AttributeError, match=r"module 'hvdlite\.torch' has no attribute 'all_reduce'"):
        _ = hvd.all_reduce
    with pytest.raises(AttributeError, match=r"module 'hvdlite\.torch\.elastic' has no attribute 'rnu'"):
        _ = hvd.elastic.rnu


def test_the_section_that_messages_name_exists():
    assert "## What it is not, yet" in README.read_text().splitlines()
