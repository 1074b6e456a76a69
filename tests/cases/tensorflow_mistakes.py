"""Failures: TensorFlow's error class and its words; and the next operation works."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case


def still_works() -> None:
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == hvd.size()


def fails(kind: type[Exception], call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    still_works()


@case(least=2)
def ranks_that_disagree() -> None:
    wrong = tf.errors.InvalidArgumentError
    rank = hvd.rank()
    fails(
        wrong, lambda: hvd.allreduce(tf.zeros([2 + rank]), name="lengths"), "lengths", "[2]", "[3]", "rank 1"
    )
    mixed = tf.zeros([2], tf.float32 if rank else tf.float64)
    fails(wrong, lambda: hvd.allreduce(mixed, name="dtypes"), "float32", "float64")
    fails(wrong, lambda: hvd.broadcast(tf.zeros([2]), rank % 2), "root")
    fails(wrong, lambda: hvd.allgather(tf.zeros([1, 2 + rank])), "rank 1")
    pair = [tf.zeros([2]), tf.zeros([1 + rank])]
    fails(wrong, lambda: hvd.grouped_allreduce(pair, name="pair"), "pair")
    fails(wrong, lambda: tf.function(lambda: hvd.allreduce(tf.zeros([2 + rank])))(), "rank 1")


@case()
def arguments_that_make_no_sense() -> None:
    wrong = tf.errors.InvalidArgumentError
    fails(wrong, lambda: hvd.allgather(tf.constant(1.0)), "first dimension")
    fails(wrong, lambda: hvd.broadcast(tf.zeros([1]), 99), "99")
    fails(wrong, lambda: hvd.alltoall(tf.zeros([1, 2]), [2] * hvd.size()), "splits")
    fails(wrong, lambda: hvd.size_op(77), "77")
    fails(ValueError, lambda: hvd.alltoall(tf.zeros([1]), []), "splits")
    fails(ValueError, lambda: hvd.allreduce(tf.zeros([1]), op=9), "op is 9")
    fails(ValueError, lambda: hvd.allreduce(tf.zeros([1]), op=hvd.Sum, average=True), "not both")
    fails(ValueError, lambda: hvd.broadcast_([tf.zeros([1])], 0), "variables")
    fails(ValueError, lambda: hvd.broadcast_variables([tf.zeros([1])], 0), "variables")
    with pytest.raises(ValueError, match="rank"):
        tf.function(hvd.allgather)(tf.constant(1.0))


@case()
def dtypes_that_cannot_be_served() -> None:
    refused = tf.errors.UnimplementedError
    fails(refused, lambda: hvd.broadcast(tf.constant(["text"]), 0), "dtype")
    fails(refused, lambda: hvd.allreduce(tf.constant([True]), op=hvd.Sum), "bool")


@case()
def what_xla_cannot_compile() -> None:
    compiled = tf.function(lambda one: hvd.allgather(one) * 2, jit_compile=True)
    fails(ValueError, lambda: compiled(tf.ones([2])), "jit_compile=False")
    inner = tf.function(lambda one: one * 2, jit_compile=True)
    assert float(tf.function(lambda one: hvd.allreduce(inner(one)))(tf.constant(1.0))) == 2.0


@case()
def tapes_and_optimizers() -> None:
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    fails(ValueError, lambda: hvd.DistributedGradientTape(tape), "twice")
    fails(
        ValueError,
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0),
        "op=Average",
    )
    for factor in (0.0, -1.0, math.inf, math.nan):
        fails(
            ValueError,
            lambda: hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=factor),  # noqa: B023
            "positive number",
        )
    fails(ValueError, lambda: hvd.DistributedGradientTape(tf.GradientTape(), num_groups=-1), "-1")
    one = tf.Variable(0.0)
    tape = tf.GradientTape()
    fails(ValueError, lambda: hvd.DistributedGradientTape(tape, groups=[[one], [one]]), "in groups twice")
    fails(
        ValueError, lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3]), "layers"
    )
    fails(TypeError, lambda: hvd.DistributedOptimizer(object()), "Keras 3")
    fails(ValueError, lambda: hvd.GradientAccumulator(0), "passes")
    fails(RuntimeError, lambda: hvd.broadcast_global_variables(0), "broadcast_variables")
    descent = tf.compat.v1.train.GradientDescentOptimizer
    fails(
        ValueError, lambda: hvd.DistributedOptimizer(descent(0.1), backward_passes_per_step=2), "Accumulator"
    )
    fails(ValueError, lambda: hvd.DistributedOptimizer(descent(0.1), backward_passes_per_step=0), "one pass")
    twice = hvd.DistributedOptimizer(descent(0.1))
    fails(ValueError, lambda: hvd.DistributedOptimizer(twice), "distributed already")
    with tf.Graph().as_default():
        accumulating = hvd.DistributedOptimizer(descent(0.1), backward_passes_per_step=2)
    fails(ValueError, lambda: accumulating.apply_gradients([]), "compute_gradients")
    for name in ("powersgd", "topk", "onebit", "int8", "fp8"):
        make = getattr(hvd.Compression, name)
        fails(ValueError, make, "sirtaki.torch")
