"""Models that are saved and loaded; operations on single values; the surroundings."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from training import (
    as_arrays,
    assert_close,
    assert_equal_on_all_ranks,
    compiled,
    digits,
    fit,
    fit_alone,
    loss,
    mine,
    one_variable,
    tensor,
)

import hvdlite

H5 = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")


class Slow(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize("make", [keras.optimizers.Adam, Slow], ids=["adam", "own"])
def test_reduced_training_goes_on_from_a_file(hvd, tmp_path, suffix, make):
    images, labels = digits(6)
    half = len(labels) // 2
    model = compiled(hvd.DistributedOptimizer(make(0.01)))
    fit(model, mine(images[:half]), mine(labels[:half]))
    path = str(tmp_path / f"model{suffix}")
    model.save(path)
    loaded = hvd.load_model(path, custom_optimizers=[Slow])
    assert isinstance(loaded.optimizer, make)
    assert_close(as_arrays(loaded.optimizer.variables), as_arrays(model.optimizer.variables), 0)
    fit(loaded, mine(images[half:]), mine(labels[half:]))
    assert_close(loaded.get_weights(), fit_alone(make(0.01), images, labels), 1e-5)
    assert_equal_on_all_ranks([*loaded.get_weights(), *as_arrays(loaded.optimizer.variables)])


def test_scaled_training_goes_on_from_an_hdf5_file(hvd, tmp_path):
    images, labels = digits(2)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0)
    model = compiled(hvd.DistributedOptimizer(scaled))
    fit(model, mine(images), mine(labels))
    path = str(tmp_path / "model.h5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the format is old
        model.save(path)
        loaded = hvd.load_model(path)
    assert int(loaded.optimizer.iterations) == 2
    assert_close(as_arrays(loaded.optimizer.variables), as_arrays(model.optimizer.variables), 0)


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "class"])
def test_copies_of_an_optimizer_reduce(hvd, way):
    ways = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda one: pickle.loads(pickle.dumps(one)),
        "class": lambda one: type(one).from_config(one.get_config()),
    }
    optimizer = ways[way](hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum))
    variable = one_variable()
    optimizer.apply([tensor(np.full(2, hvd.rank() + 1.0, "float32"))], [variable])
    assert_close(as_arrays([variable]), [np.array([1.0, 2.0]) - hvd.size() * (hvd.size() + 1) / 2], 1e-6)


def test_files_do_not_need_hvdlite(hvd, tmp_path):
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(), backward_passes_per_step=2))
    images, labels = digits(2)
    fit(model, mine(images), mine(labels))
    path = str(tmp_path / "model.keras")
    model.save(path)
    if hvd.rank() == 0:
        code = (
            f"import sys, keras; m = keras.models.load_model({path!r}); print(type(m.optimizer).__name__, "
            "int(m.optimizer.iterations), len(m.optimizer.variables), 'hvdlite' in sys.modules)"
        )
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert said.splitlines()[-1] == "Adam 2 10 False"
    hvd.barrier()


def test_export_works(hvd, backend, tmp_path):
    if backend != "tensorflow":
        pytest.skip("needs TensorFlow")
    import tensorflow as tf

    model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam()))
    images, labels = digits(1)
    fit(model, mine(images), mine(labels))
    model.export(str(tmp_path / "saved"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(loaded.serve(images[:2]), model.predict(images[:2], verbose=0), rtol=1e-5)


def test_values_of_all_ranks(hvd, backend):
    rank, size = hvd.rank(), hvd.size()
    for value in (1.0 + rank, np.float32(1 + rank), [1.0 + rank, 2.0], np.array([[rank + 1.0]], "float32")):
        first = np.ravel(np.asarray(keras.ops.convert_to_numpy(hvd.allreduce(value))))[0]
        assert first == (size + 1) / 2
    assert keras.ops.is_tensor(hvd.allreduce(1.0, name="one"))
    assert float(hvd.allreduce(1.0, op=hvd.Sum, prescale_factor=2.0)) == 2 * size
    assert float(hvd.allreduce(1.0, compression=hvd.Compression.fp16)) == 1.0
    gathered = keras.ops.convert_to_numpy(hvd.allgather(np.full((rank + 1, 2), rank, "int32")))
    np.testing.assert_array_equal(gathered[:, 0], np.repeat(np.arange(size), np.arange(size) + 1))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(hvd.broadcast([rank, 5], 1)), [1, 5])
    scattered = hvd.reducescatter(np.arange(2.0 * size, dtype="float32"), op=hvd.Sum)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(scattered), size * (np.arange(2.0) + 2 * rank))


def test_global_variables_are_a_thing_of_the_past(hvd):
    with pytest.raises(ValueError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)


def test_auto_is_no_xla_on_tensorflow(hvd, backend, monkeypatch):
    if backend != "tensorflow":
        pytest.skip("TensorFlow's XLA")
    import tensorflow as tf

    class Gpu:
        device_type = "GPU"

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [Gpu()])  # as on a machine with one
    plain = compiled(keras.optimizers.SGD(0.1))
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    monkeypatch.undo()
    assert (plain.jit_compile, model.jit_compile) == (True, False)
    images, labels = digits(1)
    fit(model, mine(images), mine(labels))
    forced = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    with pytest.raises(hvdlite.InvalidRequestError, match="jit_compile=False"):
        fit(forced, mine(images), mine(labels))


def test_horovods_names_lead_here(hvd, backend, tmp_path):
    names = ["horovod.keras", *(["horovod.tensorflow.keras"] if backend == "tensorflow" else [])]
    lines = [f"import {name} as h; print(h.__name__, h.callbacks.__name__)" for name in names]
    if hvd.rank() == 0:
        script = tmp_path / "script.py"
        script.write_text("\n".join(lines))
        command = [sys.executable, "-m", "hvdlite.as_horovod", script]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        expected = [name.replace("horovod", "hvdlite") for name in names]
        assert ended.stdout.splitlines() == [f"{name} {name}.callbacks" for name in expected]
    hvd.barrier()


def test_the_module_of_tensorflow_is_the_same(hvd, backend):
    if backend != "tensorflow":
        with pytest.raises(ImportError, match=r"Take hvdlite\.keras instead"):
            importlib.import_module("hvdlite.tensorflow.keras")
        return
    import hvdlite.tensorflow.keras as other

    assert other.callbacks.MetricAverageCallback is hvd.callbacks.MetricAverageCallback
    optimizer = other.DistributedOptimizer(keras.optimizers.SGD(0.1), None, "", "", hvd.Compression.fp16, True)
    model = compiled(optimizer)
    images, labels = digits(2)
    fit(model, mine(images), mine(labels))
    assert_equal_on_all_ranks(model.get_weights())
    model.compile(keras.optimizers.SGD(0.1), loss=loss())
