"""Names of Horovod that are still to come say so, and are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

import hvdlite.torch as hvd

README = Path(__file__).resolve().parents[2] / "README.md"
LATER = ["ObjectState", "State", "TorchState", "run", "state"]


@pytest.mark.parametrize("name", LATER)
def test_a_later_name_of_elastic_says_that_it_is_not_there_yet(name):
    with pytest.raises(AttributeError, match=rf"hvd\.elastic\.{name} is not in this version of hvdlite; see README"):
        getattr(hvd.elastic, name)
    assert not hasattr(hvd.elastic, name)
    assert name not in hvd.elastic.__all__


@pytest.mark.parametrize("name", LATER)
def test_an_import_of_a_later_name_says_so_too(name):
    with pytest.raises(ImportError, match=rf"hvd\.elastic\.{name} is not in this version of hvdlite; see README"):
        exec(f"from hvdlite.torch.elastic import ElasticSampler, {name}")


def test_an_unknown_name_is_told_as_python_does():
    with pytest.raises(AttributeError, match=r"module 'hvdlite\.torch' has no attribute 'all_reduce'"):
        _ = hvd.all_reduce
    with pytest.raises(AttributeError, match=r"module 'hvdlite\.torch\.elastic' has no attribute 'rnu'"):
        _ = hvd.elastic.rnu


def test_the_section_that_messages_name_exists():
    assert "## What it is not, yet" in README.read_text().splitlines()
