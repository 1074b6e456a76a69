"""Derivatives of the collectives.

The convention: the differentiated quantity is the sum of the losses of all ranks. So the derivative of a sum
is the sum of the ranks' incoming gradients, that of an average their average, and the gradient of a rank's
slice of a gathered tensor is the sum of its incoming gradients. (Horovod averages instead of adding for
broadcast and all-gather; `sirtaki.common.semantics` selects that.) All ranks have to compute the gradient, as
they computed the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sirtaki.bindings import request as core
from sirtaki.common import semantics
from sirtaki.common.ops.requests import Reduction
from sirtaki.tensorflow.ops import operations
from sirtaki.tensorflow.ops.op_names import part
from sirtaki.tensorflow.ops.operations import Call
from sirtaki.tensorflow.ops.topology_ops import members, place

_SUM = Reduction(core.SUM)
Derivative = Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]


def _call(op: Any, suffix: str = ".gradient") -> Call:
    return Call(part(op.inputs[0], suffix), int(op.get_attr("process_set")))


def _how(op: Any) -> Reduction:
    prescale, postscale = (tf.compat.as_text(op.get_attr(name)) for name in ("prescale", "postscale"))
    return Reduction(int(op.get_attr("reduce_op")), float(prescale), float(postscale))


def _of_floating(op: Any, gradients: Sequence[Any], derivative: Derivative) -> list[Any]:
    """Returns the gradients of all inputs (the label has none), given the differentiable outputs' gradients.

    Unused outputs count as zero, so that all ranks make the same exchange whatever each of them has used.
    """
    which = [i for i, output in enumerate(op.outputs) if output.dtype.is_floating or output.dtype.is_complex]
    which = [i for i in which if i < len(op.inputs) - 1]
    given = [_given(op.outputs[i], gradients[i]) for i in which]
    found = dict(zip(which, derivative(given), strict=True))
    return [None, *(found.get(i) for i in range(len(op.inputs) - 1))]


def _given(output: tf.Tensor, gradient: Any) -> tf.Tensor:
    """Returns a gradient in its output's dtype, whatever a custom gradient or a caller has made of it."""
    if gradient is None:
        return tf.zeros_like(output)
    return tf.cast(tf.convert_to_tensor(gradient), output.dtype)


@tf.RegisterGradient("SirtakiAllreduce")
def _of_allreduce(op: Any, *gradients: Any) -> list[Any]:
    how, called = _how(op), _call(op)
    if how.op in (core.SUM, core.AVERAGE):
        return _of_floating(op, gradients, lambda given: operations.allreduce(given, how, called))
    if how.op not in (core.MIN, core.MAX) or (how.prescale, how.postscale) != (1.0, 1.0):
        raise ValueError(
            "an all-reduce has a gradient with op=Sum and op=Average, and with op=Min and op=Max without "
            "factors; tf.stop_gradient() says that none is wanted"
        )
    return _of_floating(op, gradients, lambda given: _of_extreme(op, given, called))


def _of_extreme(op: Any, gradients: list[tf.Tensor], called: Call) -> list[tf.Tensor]:
    """Gives equal parts to the ranks that have the extreme value, as tf.reduce_max does."""
    which = [i for i, output in enumerate(op.outputs) if output.dtype.is_floating]
    # In a graph of TensorFlow 1 `==` would compare the identity of two tensors.
    is_extreme = [tf.cast(tf.equal(op.inputs[i + 1], op.outputs[i]), op.outputs[i].dtype) for i in which]
    sums = operations.allreduce([*gradients, *is_extreme], _SUM, called)
    totals, counts = sums[: len(which)], sums[len(which) :]
    return [extreme * total / count for extreme, total, count in zip(is_extreme, totals, counts, strict=True)]


@tf.RegisterGradient("SirtakiReducescatter")
def _of_reducescatter(op: Any, *gradients: Any) -> list[Any]:
    how, called = _how(op), _call(op)
    if how.op not in (core.SUM, core.AVERAGE):
        raise ValueError("a reduce-scatter has a gradient with op=Sum and op=Average only")

    def derivative(given: list[tf.Tensor]) -> list[tf.Tensor]:
        factor = tf.constant(how.prescale * how.postscale, tf.float64)
        ranks = tf.cast(tf.size(members(called.process_set)), tf.float64)
        factor *= semantics.factor_of_scattered_gradients(ranks)
        if how.op == core.AVERAGE:
            factor /= ranks
        return [result * tf.cast(factor, result.dtype) for result in operations.allgather(given, called)]

    return _of_floating(op, gradients, derivative)


@tf.RegisterGradient("SirtakiAllgather")
def _of_allgather(op: Any, *gradients: Any) -> list[Any]:
    """Sends each rank the gradients of its rows from everywhere, and adds them up."""
    called = _call(op)

    def derivative(given: list[tf.Tensor]) -> list[tf.Tensor]:
        which = [
            i for i, output in enumerate(op.outputs) if output.dtype.is_floating or output.dtype.is_complex
        ]
        sources = [op.inputs[i + 1] for i in which]
        own = [tf.shape(source, tf.int64)[:1] for source in sources]
        rows = operations.allgather(own, called._replace(label=part(called.label, ".rows")))
        sums = []
        for number, (row, splits, source) in enumerate(zip(given, rows, sources, strict=True)):
            next_call = called._replace(label=part(called.label, f".of.{number}"))
            gathered, received = operations.alltoall(row, splits, next_call)
            by_rank = tf.concat([tf.shape(received), tf.shape(source)], 0)
            combine = tf.reduce_mean if semantics.op_of_moved_gradients() == core.AVERAGE else tf.reduce_sum
            sums.append(combine(tf.reshape(gathered, by_rank), 0))
        return sums

    return _of_floating(op, gradients, derivative)


@tf.RegisterGradient("SirtakiBroadcast")
def _of_broadcast(op: Any, *gradients: Any) -> list[Any]:
    called, root = _call(op), int(op.get_attr("root"))

    def derivative(given: list[tf.Tensor]) -> list[tf.Tensor]:
        is_root = tf.equal(place()[0], root)
        sums = operations.allreduce(given, Reduction(semantics.op_of_moved_gradients()), called)
        return [total * tf.cast(is_root, total.dtype) for total in sums]

    return _of_floating(op, gradients, derivative)


@tf.RegisterGradient("SirtakiAlltoall")
def _of_alltoall(op: Any, gradient: Any, _: Any) -> list[Any]:
    output = op.outputs[0]
    if not (output.dtype.is_floating or output.dtype.is_complex):
        gradient = None
    back, _ = operations.alltoall(_given(output, gradient), op.outputs[1], _call(op))
    unsent = tf.zeros_like(op.inputs[1][tf.shape(back)[0] :])  # the splits may leave rows out
    return [None, tf.concat([back, unsent], 0), None]


for _kind in ("SirtakiBarrier", "SirtakiJoin", "SirtakiPlace", "SirtakiMembers"):
    tf.no_gradient(_kind)
