"""Says so where Keras does not run on TensorFlow."""

from __future__ import annotations

import keras


def require_tensorflow() -> None:
    """Raise `ImportError` unless Keras runs on TensorFlow."""
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise ImportError(
            f"hvdlite.tensorflow.keras: Keras runs on {backend!r} here. Take hvdlite.keras instead, which is the same "
            "for every backend, or set KERAS_BACKEND=tensorflow."
        )
