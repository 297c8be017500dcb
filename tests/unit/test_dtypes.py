"""Which dtypes travel, under which names, and what may be reduced."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hvdlite.dtypes import (
    BFLOAT16,
    SUPPORTED,
    ReduceOp,
    accumulator,
    canonical,
    check_reducible,
    is_floating,
    is_half,
    is_integer,
    name_of,
)
from hvdlite.errors import UnsupportedDtypeError

HALF, FULL = {"float16", "bfloat16"}, {"float32", "float64"}
INTEGERS = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"}
COMPLEX = {"complex64", "complex128"}


def test_the_list_is_the_promised_one():
    assert set(SUPPORTED) == {"bool"} | INTEGERS | HALF | FULL | COMPLEX


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_dtype_and_its_name_lead_to_each_other(name):
    assert name_of(SUPPORTED[name]) == name
    assert canonical(SUPPORTED[name]) == SUPPORTED[name]
    assert canonical(SUPPORTED[name].type) == SUPPORTED[name]


@pytest.mark.parametrize("name", sorted(set(SUPPORTED) - {"bfloat16"}))
def test_foreign_byte_order_becomes_native(name):
    foreign = np.dtype(name).newbyteorder()
    assert canonical(foreign) == np.dtype(name)
    assert canonical(foreign).isnative
    assert name_of(foreign) == name


@pytest.mark.parametrize(
    "dtype",
    [
        "U3",
        "S3",
        object,
        "M8[s]",
        [("a", "i4")],
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.int4,
        np.longdouble,
        np.clongdouble,
    ],
)
def test_others_are_refused_with_the_list_of_what_works(dtype):
    with pytest.raises(UnsupportedDtypeError, match="cannot be communicated; use one of bfloat16, bool, complex128"):
        canonical(dtype)


@pytest.mark.parametrize("name", SUPPORTED)
def test_kinds_are_told_apart(name):
    dtype = SUPPORTED[name]
    assert is_half(dtype) == (name in HALF)
    assert is_floating(dtype) == (name in HALF | FULL)
    assert is_integer(dtype) == (name in INTEGERS)
    assert accumulator(dtype) == (np.float32 if name in HALF else dtype)


def test_bfloat16_is_that_of_ml_dtypes():
    assert np.dtype(ml_dtypes.bfloat16) == BFLOAT16
    assert BFLOAT16.itemsize == 2


def reducible(name, op):
    if op is ReduceOp.ADASUM:
        return name in HALF | FULL
    if name == "bool":
        return op not in (ReduceOp.SUM, ReduceOp.AVERAGE)
    return not (name in COMPLEX and op in (ReduceOp.MIN, ReduceOp.MAX))


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("name", SUPPORTED)
def test_reductions_without_a_meaning_are_refused(name, op):
    if reducible(name, op):
        check_reducible(SUPPORTED[name], op)
    else:
        with pytest.raises(UnsupportedDtypeError, match=f"(?i){op.name}"):
            check_reducible(SUPPORTED[name], op)


def test_operators_have_horovods_numbers():
    assert [(op.name, int(op)) for op in ReduceOp] == [
        ("AVERAGE", 0), ("SUM", 1), ("ADASUM", 2), ("MIN", 3), ("MAX", 4), ("PRODUCT", 5),
    ]  # fmt: skip
