"""Batch normalization of Keras with the mean and the variance of the batches of all ranks.

    collectives    two allreduces of C + 1 and C values per forward, and two per backward

Squared deviations from the common mean are added up, not squares, whose difference loses all digits where the mean is
large.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdlite import InvalidRequestError, global_process_set
from hvdlite.lowlevel import ReduceOp

from .crossing import refuse_xla
from .naming import operation_name
from .ops import Reduction, reduce_tensors


@keras.saving.register_keras_serializable("hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Like `keras.layers.BatchNormalization` on the TensorFlow backend, with the statistics of all ranks' batches.

    In training forward and backward are collective: every rank must call both, with a batch of any length. Each
    example counts the same, whichever rank has it. Elsewhere, and with one rank, it is plain batch normalization.

    Args:
        fused: Horovod's; anything but False is refused.
        kwargs: of `keras.layers.BatchNormalization`. Its own `synchronized` is for `tf.distribute`, and refused.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise InvalidRequestError(f"SyncBatchNormalization(fused={fused!r}): a fused one cannot be synchronized.")
        if kwargs.get("synchronized"):
            raise InvalidRequestError("synchronized=True is of tf.distribute; leave it out here.")
        if keras.backend.backend() != "tensorflow":
            raise InvalidRequestError(
                f"SyncBatchNormalization needs the TensorFlow backend of Keras, which runs on "
                f"{keras.backend.backend()!r}; on torch take hvdlite.torch.SyncBatchNorm."
            )
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA cannot call Python

    def _moments(self, inputs: Any, mask: Any) -> Any:
        size = global_process_set.size()
        if size is None or size == 1:
            return super()._moments(inputs, mask)
        refuse_xla("SyncBatchNormalization")
        axes = self._reduction_axes
        present = None if mask is None else tf.cast(tf.convert_to_tensor(mask)[..., tf.newaxis], inputs.dtype)
        values = inputs if present is None else tf.where(present > 0, inputs, 0)
        n = tf.reduce_prod(tf.gather(tf.shape(inputs), axes)) if present is None else tf.reduce_sum(present)
        sums = _sum(tf.concat([tf.reduce_sum(values, axes), [tf.cast(n, inputs.dtype)]], 0), "sums")
        total = tf.maximum(sums[-1], 1)
        mean = sums[:-1] / total
        shape = [1] * inputs.shape.rank
        shape[self.axis] = -1
        deviations = tf.square(inputs - tf.reshape(mean, shape))
        if present is not None:
            deviations = tf.where(present > 0, deviations, 0)
        return mean, _sum(tf.reduce_sum(deviations, axes), "deviations") / total


def _sum(tensor: tf.Tensor, what: str) -> tf.Tensor:
    name = operation_name(f"sync_batch_norm.{what}", None, tensor, False, global_process_set)
    return reduce_tensors([tensor], [name], Reduction(ReduceOp.SUM, 1.0, 1.0, global_process_set))[0]
