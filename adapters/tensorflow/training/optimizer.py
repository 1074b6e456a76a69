"""Optimizers that combine gradients over the ranks: for Keras, and for TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import tensorflow as tf

from sirtaki.bindings.context import Context, add_survivor
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Adasum, Average
from sirtaki.tensorflow.ops.collectives import grouped_allreduce
from sirtaki.tensorflow.ops.compression import Compression, Compressor
from sirtaki.tensorflow.ops.library import as_written
from sirtaki.tensorflow.training.exchange import GradientCombiner, exposed


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
        device_dense, device_sparse: accepted; see `sirtaki.tensorflow.ops.collectives`.
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

    Example:
        hvd.broadcast_variables(model.variables, root_rank=0)
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        model.fit(inputs, targets, epochs=2)
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        exchange = GradientCombiner(
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


# ---- Optimizers of TensorFlow 1 (`tf.compat.v1.train`) -------------------------------------------------
# Their gradients are combined over the ranks.


@dataclass
class Accumulation:
    """The sums of several passes' gradients, in a graph that a session runs.

    Attributes:
        passes: the number of passes for one step.
        averages: whether the sums are divided by that number.
    """

    passes: int
    averages: bool
    _is_last: Any = field(default=None, init=False)  # whether the pass that runs is the last one for its step

    def add(self, gradients: Sequence[Any], combine: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Adds the gradients of a pass; returns the combined sums in the last pass, zeros in other passes."""
        dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        count = _state(tf.zeros([], tf.int64))
        sums = [
            None if gradient is None else _state(tf.zeros(gradient.shape, gradient.dtype))
            for gradient in dense
        ]
        added = [
            total.assign_add(gradient, read_value=False)
            for total, gradient in zip(sums, dense, strict=True)
            if total is not None
        ]
        with tf.control_dependencies([*added, count.assign_add(1, read_value=False)]):
            self._is_last = tf.equal(count.read_value() % self.passes, 0)
        known = [total for total in sums if total is not None]

        def combined() -> list[Any]:
            divisor = self.passes if self.averages else 1
            values = [total.read_value() for total in known]
            found = iter(values)
            means = [
                None if gradient is None else next(found) / tf.cast(divisor, gradient.dtype)
                for gradient in dense
            ]
            results = [mean for mean in combine(means) if mean is not None]
            with tf.control_dependencies(values):
                resets = [total.assign(tf.zeros_like(total), read_value=False) for total in known]
            with tf.control_dependencies(resets):
                return [tf.identity(result) for result in results]

        chosen = iter(
            tf.cond(self._is_last, combined, lambda: [tf.zeros_like(gradient) for gradient in known])
        )
        return [None if gradient is None else next(chosen) for gradient in dense]

    def apply(self, step: Callable[[], Any], global_step: Any) -> Any:
        """Returns an operation that makes the step in the last pass; else, it increments `global_step`."""
        if self._is_last is None:
            raise ValueError(
                "apply_gradients() needs the gradients that compute_gradients() of this optimizer returned: "
                "with backward_passes_per_step they are accumulated there"
            )

        def counted() -> Any:
            return tf.no_op() if global_step is None else global_step.assign_add(1, read_value=False)

        return tf.group(tf.cond(self._is_last, lambda: _true_after(step()), lambda: _true_after(counted())))


def _state(initial: Any) -> Any:
    """Returns a variable that is this rank's own: neither saved nor broadcast, nor trained."""
    kind = tf.compat.v1.GraphKeys.LOCAL_VARIABLES
    return tf.compat.v1.Variable(
        initial, trainable=False, collections=[kind], name="accumulation", use_resource=True
    )


def _true_after(operation: Any) -> Any:
    with tf.control_dependencies([operation]):
        return tf.constant(True)


class _Distributed(tf.compat.v1.train.Optimizer):
    """The abilities of a distributed optimizer besides its own class."""

    _exchange: GradientCombiner
    _accumulation: Accumulation | None

    @as_written
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Works like the optimizer's own; the gradients are combined over the ranks, all of which call it."""
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, variables = [pair for pair, _ in pairs], [pair for _, pair in pairs]
        if self._accumulation is None:
            gradients = self._combined(gradients, variables)
        else:
            gradients = self._accumulation.add(gradients, lambda sums: self._combined(sums, variables))
        return list(zip(gradients, variables, strict=True))

    @as_written
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Works like the optimizer's own."""
        pairs = list(grads_and_vars)
        if self._accumulation is None:
            return self._step(pairs, global_step, name)
        return self._accumulation.apply(lambda: self._step(pairs, global_step, name), global_step)

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradients of a variable on this rank; all ranks must call it."""
        self._exchange.keep_local(var)

    def _combined(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self._exchange.reduce(gradients, variables)

    def _step(self, pairs: list[tuple[Any, Any]], global_step: Any, name: str | None) -> Any:
        return super().apply_gradients(pairs, global_step, name)


class _AdasumDistributed(_Distributed):
    """Each rank steps with its own gradients; the changes of the variables are combined."""

    def _combined(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return list(gradients)

    def _step(self, pairs: list[tuple[Any, Any]], global_step: Any, name: str | None) -> Any:
        exchange = self._exchange
        if exchange.process_set.included() is False:
            return super()._step(pairs, global_step, name)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        # An identity would share the memory of a variable, which some kinds of variables overwrite.
        before = [tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(variable)) for variable in variables]
        with tf.control_dependencies(before):
            stepped = super()._step(pairs, global_step, name)
        with tf.control_dependencies([] if stepped is None else [stepped]):
            changes = [
                variable.read_value() - value for variable, value in zip(variables, before, strict=True)
            ]
            with exposed():
                combined = grouped_allreduce(
                    changes, compression=exchange.compression, op=Adasum, process_set=exchange.process_set
                )
        results = [value + change for value, change in zip(before, combined, strict=True)]
        return tf.group(*[variable.assign(value) for variable, value in zip(variables, results, strict=True)])


def distribute(optimizer: Any, exchange: GradientCombiner, passes: int, averages: bool) -> Any:
    """Makes an optimizer of TensorFlow 1 distributed, in place, and returns it.

    Raises:
        ValueError: it is distributed already; or passes are accumulated where no session runs.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is distributed already: call DistributedOptimizer once for it")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}, but a step needs one pass at least")
    if passes > 1 and (tf.executing_eagerly() or tf.inside_function()):
        raise ValueError(
            "backward_passes_per_step of an optimizer of TensorFlow 1 needs a graph that a session runs; "
            "elsewhere use hvd.GradientAccumulator"
        )
    kind = type(optimizer)
    mixin = _AdasumDistributed if exchange.op == Adasum else _Distributed
    optimizer.__class__ = type(
        kind.__name__, (mixin, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__}
    )
    optimizer._exchange = exchange
    optimizer._accumulation = Accumulation(passes, averages) if passes > 1 else None
    return optimizer


# ---- Accumulates the gradients of several passes on the rank, and exchanges the sum once ---------------


class GradientAccumulator:
    """An accumulator of the gradients of a number of passes; the last pass combines their sum over the ranks.

        accumulator = hvd.GradientAccumulator(4)
        ...
        gradients = tape.gradient(loss, variables)  # of a plain tf.GradientTape
        accumulator.add(gradients, lambda sums: optimizer.apply_gradients(zip(sums, variables)))

    Works eagerly and in one tf.function. All ranks must make the same passes. When the ranks of an elastic
    job change, it starts again with the first pass.

    Example:
        variables = model.trainable_variables
        accumulator = hvd.GradientAccumulator(2)  # a step for each 2 batches
        for inputs, targets in loader:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(inputs) - targets))
            accumulator.add(tape.gradient(loss, variables), lambda sums: optimizer.apply(sums, variables))
    """

    def __init__(self, passes: int, average_aggregated_gradients: bool = False, **exchange: Any) -> None:
        """Creates an accumulator of passes for a single exchange.

        Args:
            passes: the number of passes.
            average_aggregated_gradients: whether to divide the sum by their number.
            exchange: compression, op, gradient_predivide_factor, groups and process_set, as for
                `DistributedGradientTape`. Sparse gradients are made dense.

        Raises:
            ValueError: less than one pass, or arguments that do not fit together.
        """
        if passes < 1:
            raise ValueError(f"passes is {passes}; it takes one at least")
        self._passes = passes
        self._divisor = float(passes) if average_aggregated_gradients else 1.0
        self._exchange = GradientCombiner(sparse_as_dense=True, is_checked=False, **exchange)
        self._count: Any = None
        self._sums: list[Any] = []
        add_survivor(self)

    def add(self, gradients: Sequence[Any], apply: Callable[[list[Any]], Any]) -> tf.Tensor:
        """Adds gradients; in the last pass, calls `apply` with the combined sums and restarts.

        Args:
            gradients: of the same shapes and dtypes in each pass; None for a missing one, in every pass.
            apply: takes the list of combined gradients, in their order.

        Returns:
            Whether `apply` has been called, a scalar bool.
        """
        dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        with tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
                self._sums = [
                    None
                    if gradient is None
                    else tf.Variable(tf.zeros(gradient.shape, gradient.dtype), trainable=False)
                    for gradient in dense
                ]
        for total, item in zip(self._sums, dense, strict=True):
            if item is not None:
                total.assign_add(item)
        is_due = tf.equal(self._count.assign_add(1), self._passes)
        tf.cond(is_due, lambda: self._apply(apply), lambda: tf.constant(False))
        return is_due

    def move_to(self, context: Context) -> None:
        """Drops the gradients of passes that were made in another world."""
        if self._count is not None:
            self._reset()

    def retire(self) -> None:
        """Does nothing: an accumulator that is dropped has no effect on other accumulators."""

    def _reset(self) -> None:
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
        self._count.assign(0)

    def _apply(self, apply: Callable[[list[Any]], Any]) -> tf.Tensor:
        sums = [
            None if total is None else total / tf.cast(self._divisor, total.dtype) for total in self._sums
        ]
        apply(self._exchange.reduce(sums, self._sums))
        self._reset()
        return tf.constant(True)
