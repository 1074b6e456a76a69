"""Optimizers that combine gradients over the ranks: those of Keras, and those of TensorFlow 1."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import tensorflow as tf

from sirtaki.common.ops import Average
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.tensorflow.compression import Compression, Compressor
from sirtaki.tensorflow.exchange import GradientExchange
from sirtaki.tensorflow.graph_optimizer import distribute


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer step with gradients that are combined over the ranks. All ranks must call it.

    An optimizer of Keras 3 becomes that of `sirtaki.keras.DistributedOptimizer`. One of `tf.compat.v1.train`
    stays an instance of its class, and the same object is returned: `compute_gradients`, and so `minimize`,
    return combined gradients.

    Args:
        optimizer: a `keras.optimizers.Optimizer`, or a `tf.compat.v1.train.Optimizer`.
        name: for Keras, as there; otherwise accepted and ignored.
        use_locking: accepted and ignored: an optimizer has its own.
        device_dense, device_sparse: accepted; see `sirtaki.tensorflow.collectives`.
        compression: Compression.fp16 or Compression.bf16 to exchange gradients in 16 bits.
        sparse_as_dense: exchange tf.IndexedSlices as dense tensors, instead of all ranks' slices.
        backward_passes_per_step: number of passes whose gradients add up on this rank before the exchange.
            With TensorFlow 1, the session has to run `tf.compat.v1.local_variables_initializer()`.
        op: Average or Sum; with TensorFlow 1 also Min, Max, Product and Adasum. With Adasum each rank steps
            with its own gradients, and the changes of the variables are combined.
        gradient_predivide_factor: divide by it before the sum, and by size / factor after it (op=Average).
        average_aggregated_gradients: whether to divide the sum of the passes by their number.
        num_groups, groups: the number of operations; or lists of variables, whose gradients form one each.
        process_set: the ranks that train together; on other ranks the optimizer stays plain.
        scale_local_gradients: whether the gradients of variables that `register_local_var(variable)` keeps on
            this rank are divided by the number of ranks.

    Raises:
        TypeError: another kind of optimizer.
        ValueError: an optimizer that is already distributed, or arguments that do not fit together.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        exchange = GradientExchange(
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups or num_groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
        return distribute(optimizer, exchange, backward_passes_per_step, average_aggregated_gradients)
    if not any(cls.__module__.startswith("keras.") for cls in type(optimizer).__mro__):
        raise TypeError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is neither an optimizer of Keras 3 nor "
            "of tf.compat.v1.train: those of Keras 2 are not served. hvd.DistributedGradientTape goes with "
            "any optimizer"
        )
    return import_module("sirtaki.keras").DistributedOptimizer(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
