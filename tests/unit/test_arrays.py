"""Into NumPy and back: what is shared, what is copied, what is refused."""

from __future__ import annotations

import array

import ml_dtypes
import numpy as np
import pytest

from hvdlite.arrays import as_array, contiguous, writable
from hvdlite.errors import InvalidRequestError, UnsupportedDtypeError


def test_an_array_is_taken_as_it_is():
    for x in (np.arange(3), np.arange(6).reshape(2, 3).T, np.ones((), ml_dtypes.bfloat16), np.empty((0, 2))):
        assert as_array(x) is x


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [(3, np.int64, ()), (1.5, np.float64, ()), (True, np.bool_, ()), (1j, np.complex128, ()), ([1, 2], np.int64, (2,)),
     ([[1.0], [2.0]], np.float64, (2, 1)), (np.float32(2), np.float32, ()), (np.bool_(True), np.bool_, ()),
     ((), np.float64, (0,)), (range(3), np.int64, (3,))],
)  # fmt: skip
def test_numbers_and_lists_become_arrays(value, dtype, shape):
    found = as_array(value)
    assert found.dtype == dtype
    assert found.shape == shape


def test_memory_of_the_buffer_protocol_is_shared():
    raw = array.array("d", [1, 2, 3])
    found = as_array(raw)
    found[0] = 7
    assert raw[0] == 7
    assert as_array(memoryview(b"abc")).dtype == np.uint8


def test_memory_of_dlpack_is_shared():
    import torch

    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    found = as_array(tensor.T)
    np.testing.assert_array_equal(found, [[0, 3], [1, 4], [2, 5]])
    tensor[0, 1] = 9
    assert found[1, 0] == 9


def test_the_array_interface_is_understood():
    class Speaks:
        __array_interface__ = np.arange(3.0).__array_interface__
        keep = np.arange(3.0)

    class Converts:
        def __array__(self, dtype=None, copy=None):
            return np.arange(4)

    assert as_array(Converts()).tolist() == [0, 1, 2, 3]


def test_foreign_byte_order_is_converted_by_value():
    found = as_array(np.array([1, 256], ">i2"))
    assert found.dtype == np.int16
    assert found.dtype.isnative
    assert found.tolist() == [1, 256]


@pytest.mark.parametrize(
    "value", ["text", object(), None, np.array(["a"]), np.array([None]), np.array(["2020"], "M8[D]")]
)
def test_what_cannot_travel_is_refused(value):
    with pytest.raises(UnsupportedDtypeError):
        as_array(value)


def test_what_dlpack_refuses_is_refused_with_its_reason():
    import torch

    with pytest.raises(InvalidRequestError, match="Tensor cannot be read through DLPack"):
        as_array(torch.ones(2, requires_grad=True))
    with pytest.raises(InvalidRequestError, match="Tensor cannot be read through DLPack"):
        as_array(torch.ones(2).to_sparse())


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3).T,
        np.arange(9)[::-2],
        np.zeros((3, 4))[:, 1:3],
        np.broadcast_to(np.array(3.0), (2, 2)),
    ],
)
def test_contiguous_copies_what_has_strides(value):
    found = contiguous(value)
    assert found.flags.c_contiguous
    assert found.shape == value.shape
    np.testing.assert_array_equal(found, value)
    assert not np.shares_memory(found, value)


@pytest.mark.parametrize("value", [np.arange(3), np.array(5.0), np.empty((0, 3)), np.empty((2, 0)).T])
def test_contiguous_keeps_what_is_and_its_shape(value):
    found = contiguous(value)
    assert found is value
    assert found.shape == value.shape


def test_writable_memory_is_the_very_memory():
    x = np.arange(6.0).reshape(2, 3)
    assert writable(x, "call") is x
    assert writable(x.T, "call").base is x.base or np.shares_memory(writable(x.T, "call"), x)


def test_memory_of_dlpack_can_be_written():
    import torch

    tensor = torch.zeros(2)
    writable(tensor, "call")[:] = 5
    assert tensor.tolist() == [5, 5]


def read_only():
    x = np.ones(2)
    x.setflags(write=False)
    return x


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (read_only(), "read-only"),
        (np.ones(2, ">f4"), "byte order"),
        ([1.0], "list"),
        (1.0, "float"),
        (np.float32(1), "float32"),
    ],
)
def test_what_cannot_be_written_is_refused(value, words):
    with pytest.raises(InvalidRequestError, match=f"allreduce_.*{words}"):
        writable(value, "allreduce_")
