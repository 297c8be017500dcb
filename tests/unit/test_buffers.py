"""A Buffer is the flat memory of a tensor."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hvdlite.buffers import CPU, Buffer, Device, describe


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4)])
def test_a_buffer_is_a_flat_view_of_any_shape(shape):
    x = np.zeros(shape)
    buffer = Buffer.of(x)
    assert buffer.n == x.size
    assert buffer.dtype == x.dtype
    assert buffer.device == CPU
    flat = buffer.host()
    assert flat.ndim == 1
    flat[...] = 3
    np.testing.assert_array_equal(x, np.full(shape, 3.0))


def test_the_values_are_read_only_after_the_event():
    order = []

    class Event:
        def wait(self):
            order.append("waited")

    buffer = Buffer.of(np.ones(2), ready=Event())
    assert order == []
    buffer.host()
    assert order == ["waited"]


def test_memory_of_another_device_says_so():
    buffer = Buffer(None, np.dtype("f4"), 3, address=64, device=Device("cuda", 1))
    with pytest.raises(NotImplementedError, match="cuda:1"):
        buffer.host()


def test_the_owner_lives_as_long_as_the_buffer():
    owner = object()
    assert Buffer.of(np.ones(1), owner=owner).owner is owner


def test_devices_are_named():
    assert str(CPU) == "cpu"
    assert str(Device("cuda", 3)) == "cuda:3"


def test_arrays_are_described_by_dtype_and_shape():
    assert describe(np.empty((3, 4), np.float32)) == "float32[3, 4]"
    assert describe(np.empty((), ml_dtypes.bfloat16)) == "bfloat16[]"
    assert describe(np.empty(2, ">i4")) == "int32[2]"
