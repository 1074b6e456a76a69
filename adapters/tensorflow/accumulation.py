"""Accumulates the gradients of several passes on the rank, and exchanges the sum once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sirtaki.bindings.context import Context
from sirtaki.numpy.worlds import add_survivor
from sirtaki.tensorflow.exchange import GradientExchange


class GradientAccumulator:
    """An accumulator of the gradients of a number of passes; the last pass combines their sum over the ranks.

        accumulator = hvd.GradientAccumulator(4)
        ...
        gradients = tape.gradient(loss, variables)  # of a plain tf.GradientTape
        accumulator.add(gradients, lambda sums: optimizer.apply_gradients(zip(sums, variables)))

    Works eagerly and in one tf.function. All ranks must make the same passes. When the ranks of an elastic
    job change, it starts again with the first pass.
    """

    def __init__(self, passes: int, average_aggregated_gradients: bool = False, **exchange: Any) -> None:
        """Creates an accumulator of passes for one exchange.

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
        self._exchange = GradientExchange(sparse_as_dense=True, is_checked=False, **exchange)
        self._count: Any = None
        self._sums: list[Any] = []
        add_survivor(self)

    def add(self, gradients: Sequence[Any], apply: Callable[[list[Any]], Any]) -> tf.Tensor:
        """Adds gradients; with those of the last pass, calls `apply` with the combined sums, and starts
        again.

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
                    None if one is None else tf.Variable(tf.zeros(one.shape, one.dtype), trainable=False)
                    for one in dense
                ]
        for total, one in zip(self._sums, dense, strict=True):
            if one is not None:
                total.assign_add(one)
        is_due = tf.equal(self._count.assign_add(1), self._passes)
        tf.cond(is_due, lambda: self._apply(apply), lambda: tf.constant(False))
        return is_due

    def move_to(self, context: Context) -> None:
        """Drops the gradients of passes that were made in another world."""
        if self._count is not None:
            self._reset()

    def retire(self) -> None:
        """Does nothing: an accumulator that is dropped has no effect on others."""

    def _reset(self) -> None:
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
        self._count.assign(0)

    def _apply(self, apply: Callable[[list[Any]], Any]) -> tf.Tensor:
        sums = [None if one is None else one / tf.cast(self._divisor, one.dtype) for one in self._sums]
        apply(self._exchange.reduce(sums, self._sums))
        self._reset()
        return tf.constant(True)
