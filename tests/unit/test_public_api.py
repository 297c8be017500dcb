"""`import hvdlite as hvd`: what it offers, that it is documented, and that it starts nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import pytest

import hvdlite as hvd


def public_names():
    return {
        name
        for name, value in vars(hvd).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def test_all_is_exactly_what_is_public():
    assert set(hvd.__all__) == public_names() | {"__version__"}
    assert len(hvd.__all__) == len(set(hvd.__all__))


def test_all_is_sorted_as_people_look_names_up():
    assert sorted(hvd.__all__[1:], key=str.lower) == hvd.__all__[1:]


@pytest.mark.parametrize("name", [name for name in hvd.__all__ if name != "__version__"])
def test_every_function_and_class_has_a_docstring(name):
    value = getattr(hvd, name)
    if callable(value):
        assert inspect.getdoc(value)
        assert inspect.getdoc(value)[0].isupper() or inspect.getdoc(value)[0] == "`"


@pytest.mark.parametrize("name", [n for n in hvd.__all__ if f"{n}_async" in hvd.__all__])
def test_a_synchronous_function_has_the_signature_of_its_async_form(name):
    own, other = inspect.signature(getattr(hvd, name)), inspect.signature(getattr(hvd, f"{name}_async"))
    assert own.parameters == other.parameters
    assert getattr(hvd, name).__name__ == name
    assert getattr(hvd, name).__doc__ != getattr(hvd, f"{name}_async").__doc__


@pytest.mark.parametrize("name", ["allreduce", "grouped_allreduce"])
def test_an_in_place_function_has_the_signature_of_its_copying_form(name):
    for suffix in ("", "_async"):
        first = inspect.signature(getattr(hvd, f"{name}{suffix}"))
        assert inspect.signature(getattr(hvd, f"{name}{suffix}_")).parameters == first.parameters


def test_operators_have_horovods_numbers():
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


def test_parameters_stand_in_horovods_order():
    allreduce = ["tensor", "average", "name", "op", "prescale_factor", "postscale_factor", "process_set"]
    assert list(inspect.signature(hvd.allreduce).parameters) == allreduce
    assert list(inspect.signature(hvd.grouped_allreduce).parameters) == ["tensors", *allreduce[1:]]
    assert list(inspect.signature(hvd.allgather).parameters) == ["tensor", "name", "process_set"]
    assert list(inspect.signature(hvd.broadcast).parameters) == ["tensor", "root_rank", "name", "process_set"]
    assert list(inspect.signature(hvd.alltoall).parameters) == ["tensor", "splits", "name", "process_set"]
    scatter = ["tensor", "name", "op", "process_set", "prescale_factor", "postscale_factor"]
    assert list(inspect.signature(hvd.reducescatter).parameters) == scatter
    assert list(inspect.signature(hvd.init).parameters) == ["comm", "process_sets"]
    assert list(inspect.signature(hvd.join).parameters) == ["device", "process_set"]


def test_importing_starts_neither_mpi_nor_a_framework_nor_a_thread():
    code = (
        "import sys, threading, os; before = dict(os.environ); import hvdlite\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'mpi4py', 'torch', 'tensorflow', 'jax', 'keras'}, loaded\n"
        "assert threading.active_count() == 1 and dict(os.environ) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
