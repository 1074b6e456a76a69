"""Optimizers of TensorFlow 1, those of `tf.compat.v1.train`, with gradients combined over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from sirtaki.common.ops import Adasum
from sirtaki.tensorflow.autograph import as_written
from sirtaki.tensorflow.collectives import grouped_allreduce
from sirtaki.tensorflow.exchange import GradientExchange, exposed


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
        """Adds the gradients of a pass; returns the combined sums in the last one, zeros in the others."""
        dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        count = _state(tf.zeros([], tf.int64))
        sums = [None if one is None else _state(tf.zeros(one.shape, one.dtype)) for one in dense]
        added = [
            total.assign_add(one, read_value=False)
            for total, one in zip(sums, dense, strict=True)
            if total is not None
        ]
        with tf.control_dependencies([*added, count.assign_add(1, read_value=False)]):
            self._is_last = tf.equal(count.read_value() % self.passes, 0)
        known = [total for total in sums if total is not None]

        def combined() -> list[Any]:
            divisor = self.passes if self.averages else 1
            values = [total.read_value() for total in known]
            found = iter(values)
            means = [None if one is None else next(found) / tf.cast(divisor, one.dtype) for one in dense]
            results = [one for one in combine(means) if one is not None]
            with tf.control_dependencies(values):
                resets = [total.assign(tf.zeros_like(total), read_value=False) for total in known]
            with tf.control_dependencies(resets):
                return [tf.identity(result) for result in results]

        chosen = iter(tf.cond(self._is_last, combined, lambda: [tf.zeros_like(one) for one in known]))
        return [None if one is None else next(chosen) for one in dense]

    def apply(self, step: Callable[[], Any], global_step: Any) -> Any:
        """Returns an operation that makes the step in the last pass; in the others only counts it."""
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

    _exchange: GradientExchange
    _accumulation: Accumulation | None

    @as_written
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Works like the optimizer's own; the gradients are combined over the ranks, all of which call it."""
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, variables = [one for one, _ in pairs], [one for _, one in pairs]
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


def distribute(optimizer: Any, exchange: GradientExchange, passes: int, averages: bool) -> Any:
    """Turns an optimizer of TensorFlow 1 into a distributed one, in place, and returns it.

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
