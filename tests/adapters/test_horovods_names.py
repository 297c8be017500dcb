"""Each name of Horovod for PyTorch, TensorFlow and Keras exists, and takes the calls that Horovod's takes.

The names are in horovod_*_names.txt, by Horovod's module. They are looked up under Horovod's own module names, as
programs do.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlite as core
import hvdlite.keras
import hvdlite.tensorflow
import hvdlite.torch as hvd
from hvdlite import as_horovod

TABLES = sorted(Path(__file__).parent.glob("horovod_*_names.txt"))
MISSING = object()
ADAPTERS = (hvdlite.keras, hvdlite.tensorflow)  # others are compared by torch's


def rows() -> list[tuple[str, str]]:
    """(module, entry) of all tables."""
    found, module = [], ""
    for line in [line for table in TABLES for line in table.read_text().splitlines()]:
        if line.startswith("["):
            module = line.strip("[]")
        elif line and not line.startswith("#"):
            found.append((module, line))
    return found


@pytest.fixture(scope="module")
def horovod() -> Iterator[None]:
    """`import horovod` as in a program that runs under hvdlite.as_horovod."""
    known, finders = set(sys.modules), list(sys.meta_path)
    sys.path.insert(0, as_horovod.FOLDER)
    yield
    sys.path.remove(as_horovod.FOLDER)
    sys.meta_path[:] = finders
    for name in [name for name in set(sys.modules) - known if name.split(".")[0] == "horovod"]:
        del sys.modules[name]


def look_up(module: str, path: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, MISSING)
    return found


def reference_signature(parameters: str, framework: Any = hvd) -> inspect.Signature:
    names = {name: getattr(framework, name) for name in ("Average", "Sum", "Compression", "global_process_set")}
    exec(f"def function({parameters}): ...", names)
    return inspect.signature(names["function"])


def takes_less(ours: inspect.Signature, reference: inspect.Signature) -> str:
    """Return what is wrong with our signature; "" if every call that the reference's takes means the same to it."""
    mine, theirs = list(ours.parameters.values()), list(reference.parameters.values())
    for one, other in zip(mine, theirs, strict=False):
        if one.name != other.name:
            return f"{one.name!r} stands where {other.name!r} was"
        if one.kind is not other.kind:
            return f"{one.name!r} is {one.kind.description}"
        if one.default != other.default and other.default is not inspect.Parameter.empty:
            return f"the default of {one.name!r} is {one.default!r}, and was {other.default!r}"
    if len(mine) < len(theirs):
        return f"{theirs[len(mine)].name!r} is missing"
    new = [one.name for one in mine[len(theirs) :] if one.default is one.empty]
    return f"{new} are needed" if new else ""


@pytest.mark.parametrize(("module", "entry"), rows())
def test_a_name_of_horovod_is_there_and_takes_its_calls(horovod, module, entry):
    path, parameters, value = re.fullmatch(r"([\w.]+)(?:\((.*)\))?(?: = (\d+))?", entry).groups()
    found = look_up(module, path)
    assert found is not MISSING
    if value is not None:
        assert found == int(value)
        assert isinstance(found, int)
    if parameters is not None:
        framework = next((a for a in ADAPTERS if module.startswith(a.__name__.replace("hvdlite", "horovod", 1))), hvd)
        assert not takes_less(inspect.signature(found), reference_signature(parameters, framework))


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ("tensor, op, name=None", "'op' stands where 'name' was"),
        ("tensor", "'name' is missing"),
        ("tensor, *, name=None", "'name' is keyword-only"),
        ("tensor, name='x'", "the default of 'name' is 'x', and was None"),
        ("tensor, name", "the default of 'name'"),
        ("tensor, name=None, *, root", "['root'] are needed"),
        ("tensor, name=None, root=0", ""),
    ],
)
def test_the_comparison_of_signatures_sees_what_would_break_a_call(parameters, problem):
    reference = reference_signature("tensor, name=None")
    found = takes_less(reference_signature(parameters), reference)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_horovods_modules_are_hvdlites_own(horovod):
    for name in ("", ".mpi_ops", ".compression", ".functions", ".optimizer"):
        theirs, ours = importlib.import_module(f"horovod.torch{name}"), importlib.import_module(f"hvdlite.torch{name}")
        assert theirs is ours
        assert ours.__spec__.name == f"hvdlite.torch{name}"


def test_exceptions_have_horovods_bases(horovod):
    exceptions = importlib.import_module("horovod.common.exceptions")
    assert exceptions.HorovodInternalError is hvd.HorovodInternalError
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    interrupt = exceptions.HostsUpdatedInterrupt(True)
    assert isinstance(interrupt, RuntimeError)
    assert (interrupt.skip_sync, interrupt.args) == (True, (True,))
    mismatch = exceptions.HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert isinstance(mismatch, ImportError)
    assert (mismatch.name, mismatch.version, mismatch.installed_version) == ("torch", "1.0", "2.0")
    assert str(mismatch) == exceptions.get_version_mismatch_message("torch", "1.0", "2.0")


def test_helpers_compute_what_horovods_do(horovod):
    util = importlib.import_module("horovod.common.util")
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert util.split_list([1], 2) == [[1], []]
    assert [n for n in range(10) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert (util.is_iterable("ab"), util.is_iterable(3)) == (True, False)
    assert [util.extension_available(name) for name in ("torch", "tensorflow", "mxnet")] == [True, True, False]
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match="horovod.mxnet is not in this version"):
        util.check_extension("horovod.mxnet")
    choose = util.get_average_backwards_compatibility_fun(hvd.mpi_ops)
    assert choose(hvd.Sum, None) == hvd.Sum
    assert choose(None, None) == hvd.Average
    with pytest.warns(DeprecationWarning, match="average=False is deprecated"):
        assert choose(None, False) == hvd.Sum
    with pytest.raises(ValueError, match="average=False are both given"):
        choose(hvd.Sum, False)


# What raises which class (0.3 of the behaviour that scripts rely on).

VALUE_ERRORS = {
    "broadcast root": lambda rank, one: hvd.broadcast(torch.ones(2), 7),
    "set that is not registered": lambda rank, one: hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([0, 1])),
    "not a member": lambda rank, one: hvd.barrier(process_set=one),
    "more rows than there are": lambda rank, one: hvd.alltoall(torch.ones(2), splits=[2, 1]),
    "splits of two dimensions": lambda rank, one: hvd.alltoall(torch.ones(2), splits=[[1, 1]]),
    "too few splits": lambda rank, one: hvd.alltoall(torch.ones(2), splits=[1]),
    "rows that cannot be cut evenly": lambda rank, one: hvd.alltoall(torch.ones(3)),
    "reducescatter of a scalar": lambda rank, one: hvd.reducescatter(torch.tensor(1.0)),
    "complex minimum": lambda rank, one: hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Min),
    "empty group": lambda rank, one: hvd.grouped_allreduce([]),
    "op and average": lambda rank, one: hvd.allreduce(torch.ones(2), op=hvd.Sum, average=False),
    "same ranks twice": lambda rank, one: hvd.add_process_set([0]),
    "name in use": lambda rank, one: [hvd.allreduce_async(torch.ones(2), name=f"mine.{rank}") for _ in range(2)],
}
INTERNAL_ERRORS = {
    "shapes": lambda rank: hvd.allreduce(torch.ones(2 + rank), name="x"),
    "dtypes": lambda rank: hvd.allreduce(torch.ones(2, dtype=[torch.float32, torch.float64][rank]), name="x"),
    "kinds": lambda rank: [hvd.allreduce, hvd.allgather][rank](torch.ones(2), name="x"),
    "roots": lambda rank: hvd.broadcast(torch.ones(2), rank, name="x"),
    "factors": lambda rank: hvd.allreduce(torch.ones(2), name="x", prescale_factor=rank + 1.0),
    "minimum of a reducescatter": lambda rank: hvd.reducescatter(torch.ones(2), name="x", op=hvd.Min),
}


@pytest.mark.parametrize("what", VALUE_ERRORS)
def test_what_one_rank_can_see_to_be_wrong_is_a_value_error(ranks, what):
    def body(rank):
        one = hvd.add_process_set([0])
        if what != "not a member" or rank == 1:
            with pytest.raises(ValueError):
                VALUE_ERRORS[what](rank, one)
        return hvd.allreduce(torch.tensor([1.0 + rank]), name="after").item()

    assert ranks(2, body) == [1.5, 1.5]


@pytest.mark.parametrize("what", INTERNAL_ERRORS)
def test_what_the_ranks_disagree_on_is_an_internal_error(ranks, what):
    def body(rank):
        with pytest.raises(hvd.HorovodInternalError):
            INTERNAL_ERRORS[what](rank)
        return hvd.allreduce(torch.tensor([1.0 + rank]), name="after").item()

    assert ranks(2, body) == [1.5, 1.5]


def test_before_init_queries_are_value_errors_and_operations_internal_errors():
    for query in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.is_homogeneous, hvd.mpi_threads_supported):
        with pytest.raises(ValueError, match=r"use hvd.init\(\) first"):
            query()
    with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
        hvd.allreduce(torch.ones(2))
    assert (hvd.is_initialized(), hvd.mpi_enabled()) == (False, False)


def test_a_process_set_prints_as_horovods():
    assert str(hvd.ProcessSet(reversed(range(3)))) == "ProcessSet(process_set_id=None, ranks=[0, 1, 2], mpi_comm=None)"


def test_tools_see_the_process_sets_through_basics(ranks):
    def body(rank):
        odd = hvd.add_process_set([1])
        basics = hvd.mpi_ops._basics
        before = basics._get_process_set_ids_and_ranks()
        hvd.remove_process_set(odd)
        return basics.rank(), basics.size(), before, basics._get_process_set_ids_and_ranks()

    assert ranks(2, body) == [(rank, 2, {0: [0, 1], 1: [1]}, {0: [0, 1]}) for rank in range(2)]


def test_horovods_autograd_functions_apply(ranks):
    ops = hvd.mpi_ops
    everyone = hvd.global_process_set

    def body(rank):
        x = torch.tensor([1.0, 2.0]) * (rank + 1)
        x.requires_grad_()
        outputs = [
            ops.HorovodAllreduce.apply(x, None, "a", hvd.Sum, 1.0, 1.0, everyone),
            *ops.HorovodGroupedAllreduce.apply(None, "b", hvd.Sum, 1.0, 1.0, everyone, x, 10 * x),
            ops.HorovodAllgather.apply(x, "c", everyone),
            *ops.HorovodGroupedAllgather.apply("d", everyone, x, 10 * x),
            ops.HorovodBroadcast.apply(x, 1, "e", everyone),
            *ops.HorovodAlltoall.apply(x, None, "f", everyone),
            ops.HorovodReducescatter.apply(x, "g", hvd.Sum, everyone, 1.0, 1.0),
            *ops.HorovodGroupedReducescatter.apply("h", hvd.Sum, everyone, 1.0, 1.0, x, 10 * x),
        ]
        outputs[0].sum().backward()
        return [output.tolist() for output in outputs], x.grad.tolist()

    results = ranks(2, body)
    for rank, (outputs, gradient) in enumerate(results):
        gathered, mine = [1, 2, 2, 4], [3, 6][rank]
        assert outputs == [
            [3, 6], [3, 6], [30, 60], gathered, gathered, [10 * g for g in gathered], [2, 4],
            [1 + rank, 2 + 2 * rank], [1, 1], [mine], [mine], [10 * mine],
        ]  # fmt: skip
        assert gradient == [2, 2]


@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2]])
def test_adasum_takes_any_set_of_ranks(ranks, members):
    def body(rank):
        some = hvd.add_process_set([0, 1])
        chosen = some if members == [0, 1] else hvd.global_process_set
        mine = torch.eye(3)[rank] * (rank + 2)  # at right angles: Adasum adds them up
        return hvd.allreduce(mine, op=hvd.Adasum, process_set=chosen).tolist() if rank in members else None

    expected = [2.0, 3.0, 4.0 if 2 in members else 0.0]
    assert ranks(3, body)[:2] == [expected] * 2


@pytest.mark.parametrize("name", sorted(set(core.__all__) & set(vars(hvd))))
def test_no_module_hides_a_name_of_the_core(name):
    assert isinstance(getattr(hvd, name), types.ModuleType) == isinstance(getattr(core, name), types.ModuleType)
