"""Optimizers that combine gradients over the ranks: those of Keras."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sirtaki.common.ops import Average
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.tensorflow.compression import Compression, Compressor


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
    """Returns a Keras 3 optimizer that combines gradients over the ranks:
    `sirtaki.keras.DistributedOptimizer`.

    Args:
        optimizer: a `keras.optimizers.Optimizer`.
        use_locking: accepted and ignored; it only matters for TensorFlow 1.

    The others are those of `sirtaki.keras.DistributedOptimizer`.

    Raises:
        TypeError: another kind of optimizer.
    """
    if not any(cls.__module__.startswith("keras.") for cls in type(optimizer).__mro__):
        raise TypeError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is no optimizer of Keras 3: those of "
            "TensorFlow 1 and of Keras 2 are not served. hvd.DistributedGradientTape goes with any optimizer"
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
