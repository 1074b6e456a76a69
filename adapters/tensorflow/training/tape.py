"""Gradient tapes that combine their gradients over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Average
from sirtaki.tensorflow.ops.compression import Compression, Compressor
from sirtaki.tensorflow.ops.library import as_written
from sirtaki.tensorflow.training.exchange import GradientCombiner


class _Distributed:
    """The base of a distributed tape: its class is derived from this and from its own."""

    _exchange: GradientCombiner

    @as_written
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Works like tf.GradientTape.gradient, combined over the ranks. All of them must call it.

        `use_generic_names` is accepted: names never depend on those of variables.
        """
        found = super().gradient(  # type: ignore[misc]  # the tape's own
            target, sources, output_gradients, unconnected_gradients
        )
        flat = tf.nest.flatten(found)
        return tf.nest.pack_sequence_as(sources, self._exchange.reduce(flat, tf.nest.flatten(sources)))

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradients of this variable on this rank.

        They are divided by the number of ranks, unless scale_local_gradients is False.
        """
        self._exchange.keep_local(source)


@as_written
def DistributedGradientTape(  # noqa: N802  # Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a tape like the given tape; its `gradient()` combines over the ranks.

    All ranks must call `gradient()`.

    Eagerly all gradients are one operation. In a function they are a few, of 8 MiB or more, from the last
    source to the first, so that they are exchanged while the rest is computed.

    Args:
        gradtape: the tape, before or after it has recorded.
        device_dense, device_sparse: accepted; see `sirtaki.tensorflow.ops.collectives`.
        compression: Compression.fp16 or Compression.bf16 to exchange floating elements in 16 bits.
        sparse_as_dense: exchange tf.IndexedSlices as dense tensors, instead of all ranks' slices.
        op: Average, Sum, Min, Max, Product or Adasum.
        gradient_predivide_factor: divide by it before the sum, and by size / factor after it (op=Average).
        num_groups, groups: the number of operations; or lists of variables, whose gradients form one each.
        process_set: the ranks that train together; on other ranks the tape stays plain.
        scale_local_gradients: divide the gradients of local sources by the number of ranks.

    Returns:
        A tape of a class derived from the given one's, which shares its records.

    Raises:
        ValueError: a tape that is already distributed, or arguments that do not fit together.

    Example:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs) - targets))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)  # the means over all ranks
        optimizer.apply(gradients, model.trainable_variables)
    """
    if isinstance(gradtape, _Distributed):
        raise ValueError(
            "this tape is a DistributedGradientTape already: its gradients would be combined twice"
        )
    own = type(gradtape)
    tape: Any = object.__new__(type(own.__name__, (_Distributed, own), {}))
    tape.__dict__ = gradtape.__dict__
    tape._exchange = GradientCombiner(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups or num_groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return tape


@as_written
def PartialDistributedGradientTape(  # noqa: N802  # Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Works like `DistributedGradientTape`; the gradients of `local_layers` stay on this rank.

    Args:
        local_layers: a Keras layer, or a list of them.

    Raises:
        ValueError: an object that is not a layer; else as for `DistributedGradientTape`.

    Example:
        head = keras.layers.Dense(2)  # each rank trains its own
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(head(model(inputs)) - targets))
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=head)
        variables = model.trainable_variables + head.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    """
    layers = [] if local_layers is None else tf.nest.flatten(local_layers)
    wrong = next((layer for layer in layers if not hasattr(layer, "trainable_weights")), None)
    if wrong is not None:
        raise ValueError(f"local_layers takes layers of Keras, not {type(wrong).__name__}")
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers:
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape
