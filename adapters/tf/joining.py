"""`join`, for ranks that run out of data."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import hvdlite

from .autograph import plain_python
from .crossing import refuse_xla
from .errors import as_tensorflows


@plain_python
def join() -> tf.Tensor:
    """Take part in the others' operations with zeros until all ranks have joined. Collective.

    Returns:
        The rank that joined last, an int32 scalar.
    """
    if tf.executing_eagerly():
        with as_tensorflows():
            return tf.constant(hvdlite.join(), tf.int32)
    refuse_xla("join()")
    last = tf.numpy_function(lambda: np.int32(hvdlite.join()), [], tf.int32, name="hvdlite_join")
    last.set_shape([])
    return last
