"""Batch normalisation over the batches of all ranks, for Keras 3 on TensorFlow."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from sirtaki.bindings.context import find, is_elastic
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Sum
from sirtaki.common.training.combinations import require_all_ranks
from sirtaki.tensorflow._private import require_moments
from sirtaki.tensorflow.ops.collectives import allreduce

if int(keras.__version__.partition(".")[0]) < 3:
    raise ImportError(f"SyncBatchNormalization needs Keras 3 or newer; this is Keras {keras.__version__}")

require_moments(keras.__version__)


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """A keras.layers.BatchNormalization over the batches of all ranks, which may differ in length.

    It exchanges once forward and once backward while training, and otherwise never. All ranks must call it.

    Example:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), hvd.SyncBatchNormalization()])
        outputs = model(inputs, training=True)  # normalised with mean and variance of all ranks' batches
    """

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **options: Any
    ) -> None:
        """Creates a layer that is not built yet.

        Args:
            fused: has to be False: fused normalisation uses one rank's batch only.
            process_set: the ranks whose batches are used.
            options: those of keras.layers.BatchNormalization.

        Raises:
            ValueError: fused is not False, Keras does not run on TensorFlow, or a process set in an elastic
                job.
        """
        if fused is not False:
            raise ValueError("SyncBatchNormalization cannot be fused; leave `fused` out")
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                f"this SyncBatchNormalization is for Keras on TensorFlow, and Keras runs on "
                f"{keras.backend.backend()}; set KERAS_BACKEND=tensorflow before Keras is imported"
            )
        require_all_ranks(process_set)
        super().__init__(**options)
        self.process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        return _over_ranks(self, super()._moments(inputs, mask), inputs, mask, self.process_set)


def _serve_synchronized() -> None:
    """Makes `keras.layers.BatchNormalization(synchronized=True)` exchange, too, once there are several ranks.

    Keras computes its moments over the replicas of tf.distribute: without them, over one rank's batch.
    """
    kind: Any = keras.layers.BatchNormalization
    plain = kind._moments

    @functools.wraps(plain)
    def moments(self: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        own, context = plain(self, inputs, mask), find()
        is_alone = context is None or (context.size == 1 and not is_elastic())
        if is_alone or not self.synchronized or isinstance(self, SyncBatchNormalization):
            return own
        return _over_ranks(self, own, inputs, mask, global_process_set)

    kind._moments = moments


def _over_ranks(
    layer: Any, moments: tuple[Any, Any], inputs: Any, mask: Any, process_set: ProcessSet
) -> tuple[Any, Any]:
    """Returns mean and variance of each channel over all ranks, in the dtype of the inputs.

    Each rank's own are computed as in Keras; the values added up over the ranks are sums in float64, which is
    precise enough to subtract the squared mean.
    """
    mean, variance = (tf.cast(moment, tf.float64) for moment in moments)
    count = _count(layer, inputs, mask)
    squares = variance + tf.square(mean)
    own = tf.stack([mean, squares]) * count
    own = tf.where(count > 0, own, tf.zeros_like(own))  # a rank without data has no mean
    sums = allreduce(
        tf.concat([tf.reshape(count, [1]), tf.reshape(own, [-1])], 0), op=Sum, process_set=process_set
    )
    means = tf.reshape(sums[1:] / sums[0], tf.shape(own))
    over_all = means[0], tf.maximum(means[1] - tf.square(means[0]), 0.0)
    mean, variance = (tf.cast(value, inputs.dtype) for value in over_all)
    return mean, variance


def _count(layer: Any, inputs: Any, mask: Any) -> tf.Tensor:
    """Returns the number of unmasked values per channel; a float64 scalar."""
    values, channels = tf.size(inputs, tf.int64), tf.shape(inputs, tf.int64)[layer.axis]
    count = tf.cast(values // tf.maximum(channels, 1), tf.float64)
    if mask is None:
        return count
    used = tf.reduce_sum(tf.cast(mask, tf.float64))
    return count * used / tf.maximum(tf.cast(tf.size(mask), tf.float64), 1.0)


_serve_synchronized()
