"""Pure parts of hvdlite.tensorflow, on one rank."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

from hvdlite.tensorflow.exchange import buckets_of, bundles_of
from hvdlite.tensorflow.memory import ALIGNMENT, Pool


def test_buckets_begin_with_the_last_gradient_and_end_when_full():
    nbytes = {0: 5, 1: 1, 2: 7, 3: 2, 4: 2}
    bundles = bundles_of(list(nbytes), None)
    assert buckets_of(bundles, nbytes, most=4) == [[[4], [3]], [[2]], [[1], [0]]]
    assert buckets_of(bundles, nbytes, most=100) == [[[4], [3], [2], [1], [0]]]
    assert buckets_of([[0, 3], [1], [2], [4]], nbytes, most=4) == [[[4], [0, 3]], [[2]], [[1]]]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (None, [[1], [2], [5], [6], [8]]),
        (2, [[1, 2, 5], [6, 8]]),
        (9, [[1], [2], [5], [6], [8]]),
        ([[8, 1], [3], [5]], [[8, 1], [5], [2], [6]]),
    ],
)
def test_groups_are_a_number_or_lists_and_what_has_no_gradient_is_left_out(groups, expected):
    assert bundles_of([1, 2, 5, 6, 8], groups) == expected


@pytest.mark.parametrize("shape", [(), (3, 5), (4096,), (100_000,)])
def test_memory_begins_where_tensorflow_takes_it_over(shape):
    pool = Pool()
    for _ in range(5):
        array = pool.take(shape, np.dtype("float32"))
        assert (array.shape, array.dtype, array.ctypes.data % ALIGNMENT) == (shape, np.float32, 0)
        array[...] = 1.0


def test_memory_is_used_again_once_no_array_is_over_it():
    pool = Pool()
    first = pool.take((4096,), np.dtype("float64"))
    address, part = first.ctypes.data, first.reshape(64, 64)[3:].view(np.int64)
    del first
    gc.collect()
    other = pool.take((8192,), np.dtype("float32"))
    assert other.ctypes.data != address  # `part` lives on
    del part
    gc.collect()
    assert pool.take((64, 64), np.dtype("float64")).ctypes.data == address
    pool.clear()


def test_the_import_adds_little_to_tensorflows_and_no_keras():
    code = (
        "import sys, tensorflow; before = set(sys.modules); import hvdlite.tensorflow\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} - {'hvdlite'}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    new = set(eval(ended.stdout))
    assert not new & {"mpi4py", "torch", "jax", "keras", "sklearn", "scipy"}, new
