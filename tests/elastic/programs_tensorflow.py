"""Programs with TensorFlow whose ranks change, as changing.py runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sirtaki.tensorflow as hvd

STEPS = 3  # in each world
ROWS, FEATURES = 4, 3


def batch(step: int, rank: int) -> tuple[Any, Any]:
    numbers = np.random.default_rng((step, rank)).integers(-2, 3, (ROWS, FEATURES + 1)).astype(np.float64)
    return numbers[:, :FEATURES], numbers[:, FEATURES:]


def whole_batch(step: int, size: int) -> tuple[Any, Any]:
    parts = [batch(step, rank) for rank in range(size)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def variables() -> list[Any]:
    return [tf.Variable(tf.ones([FEATURES, 2], tf.float64)), tf.Variable(tf.ones([2, 1], tf.float64))]


def loss_of(model: list[Any], x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.nn.relu(x @ model[0]) @ model[1] - y))


def descend(model: list[Any], gradients: list[Any]) -> None:
    for variable, gradient in zip(model, gradients, strict=True):
        variable.assign_sub(0.0625 * gradient)


def trained_alone(sizes: Sequence[int]) -> list[Any]:
    """Returns what one process would have, with the batches of all ranks of each world."""
    model = variables()
    for step in range(STEPS * len(sizes)):
        with tf.GradientTape() as tape:
            loss = loss_of(model, *whole_batch(step, sizes[step // STEPS]))
        descend(model, tape.gradient(loss, model))
    return model


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-12)


class Tape:
    """A loop of one's own with a distributed tape, in a function that is traced once."""

    is_function = True

    def __init__(self) -> None:
        self.model = variables()
        self.state = hvd.elastic.TensorFlowState(self.model, step=0)
        self.traced = 0
        self.step = tf.function(self._step) if self.is_function else self._step

    def _step(self, x: Any, y: Any) -> None:
        self.traced += 1
        with tf.GradientTape() as tape:
            loss = loss_of(self.model, x, y)
        distributed = hvd.DistributedGradientTape(tape, num_groups=2)
        descend(self.model, distributed.gradient(loss, self.model))

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        for _ in range(STEPS):
            x, y = batch(self.state.step, hvd.rank())
            self.step(tf.constant(x), tf.constant(y))
            self.state.step += 1
            self.state.commit()
        assert_close(self.model, trained_alone(sizes))
        assert not self.is_function or self.traced == 1
        for _ in range(2):  # what is not committed is undone
            self.step(tf.constant(x), tf.constant(y))
        self.state.step = 99
        self.state.restore()
        assert_close(self.model, trained_alone(sizes))
        assert self.state.step == STEPS * len(sizes)


class EagerTape(Tape):
    is_function = False


class Accumulator:
    """Passes that are added up before an exchange; those of a world that has ended do not count."""

    def __init__(self) -> None:
        self.model = variables()
        self.state = hvd.elastic.TensorFlowState(self.model, step=0)
        self.accumulator = hvd.GradientAccumulator(2, average_aggregated_gradients=True)
        self.step = tf.function(self._step)

    def _step(self, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(self.model, x, y)
        self.accumulator.add(tape.gradient(loss, self.model), lambda sums: descend(self.model, sums))

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        for _ in range(STEPS):
            x, y = batch(self.state.step, hvd.rank())
            for _ in range(2):  # twice the same, whose mean is exact
                self.step(tf.constant(x), tf.constant(y))
            self.state.step += 1
        self.state.commit()
        assert_close(self.model, trained_alone(sizes))
        x, y = batch(1000, hvd.rank())
        self.step(tf.constant(x), tf.constant(y))  # the first pass of a step that is never taken


class Normalisation:
    """Batch normalisation over the batches of all ranks, in a function that is traced once."""

    state = None

    def __init__(self) -> None:
        self.layer = hvd.SyncBatchNormalization(dtype="float64", momentum=0.0, epsilon=0.0)
        self.layer.build((None, FEATURES))
        self.run = tf.function(self._run)

    def _run(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = self.layer(x, training=True)
            loss = tf.reduce_sum(result * result * result)
        return result, tape.gradient(loss, x)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        whole = np.random.default_rng(number).normal(size=(ROWS * hvd.size(), FEATURES))
        mine = slice(ROWS * hvd.rank(), ROWS * (hvd.rank() + 1))
        result, gradient = self.run(tf.constant(whole[mine]))
        x = tf.constant(whole)
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean, variance = tf.nn.moments(x, 0)
            wanted = (x - mean) / tf.sqrt(variance)
            loss = tf.reduce_sum(wanted * wanted * wanted)
        np.testing.assert_allclose(result, wanted[mine], rtol=1e-9)
        np.testing.assert_allclose(gradient, tape.gradient(loss, x)[mine], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(self.layer.moving_mean.numpy(), mean, rtol=1e-9)


class Datasets:
    """Parts of datasets that were made in another world."""

    state = None

    def __init__(self) -> None:
        from sirtaki.keras import shard

        numbers = tf.data.Dataset.range(13)
        self.known = shard(numbers, shuffle=False).batch(2)
        self.unknown = shard(numbers.filter(lambda one: one < 12), shuffle=False)
        self.endless = shard(numbers.repeat(), shuffle=False).take(5)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        rank, size = hvd.rank(), hvd.size()
        for _ in range(2):
            own = [one for batch in self.known for one in batch.numpy().tolist()]
            assert own == list(range(13))[rank::size][: 13 // size]
            own = [int(one) for one in self.unknown]
            assert own == list(range(12))[rank::size]
            assert [int(one) for one in self.endless] == [(rank + size * i) % 13 for i in range(5)]


class TopologyOps:
    """Numbers of the world inside functions, and functions that would keep them."""

    state = None

    def __init__(self) -> None:
        self.facts = tf.function(lambda: (hvd.rank_op(), hvd.size_op()))

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        assert [int(one) for one in self.facts()] == [hvd.rank(), hvd.size()]
        assert hvd.size() == sizes[-1]
        for name in ("rank", "size", "local_rank", "local_size"):
            frozen = tf.function(lambda name=name: tf.constant(getattr(hvd, name)()), autograph=False)
            with pytest.raises(ValueError, match=rf"use hvd.{name}_op\(\)"):
                frozen()


class Refusals:
    """Objects on some of the ranks."""

    state = None

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        first = hvd.add_process_set([0])
        for make in (
            lambda: hvd.DistributedGradientTape(tf.GradientTape(), process_set=first),
            lambda: hvd.GradientAccumulator(2, process_set=first),
            lambda: hvd.SyncBatchNormalization(process_set=first),
        ):
            with pytest.raises(ValueError, match="leave out process_set"):
                make()
        some = tf.function(lambda: hvd.allreduce(1.0, process_set=first))
        with pytest.raises(ValueError, match="cannot use a process set"):
            some()
        hvd.remove_process_set(first)
        with pytest.raises(ValueError, match="sessions"):
            hvd.elastic.TensorFlowState(variables(), session=object())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="needs the variables"):
            hvd.elastic.TensorFlowState()


class FailedExchange:
    """The second of two exchanges fails: nothing of the step has been assigned, not even the first part."""

    state = None

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        size = 2 if hvd.rank() == 0 else 3  # the ranks disagree about the second gradient
        model = [tf.Variable(tf.ones([4])), tf.Variable(tf.ones([size]))]

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model[0]) + tf.reduce_sum(model[1])
            distributed = hvd.DistributedGradientTape(tape, groups=[[model[0]], [model[1]]])
            descend_single(model, distributed.gradient(loss, model))

        for _ in range(5):
            with pytest.raises(tf.errors.InvalidArgumentError):
                step()
        for variable in model:
            assert (variable.numpy() == 1.0).all()


def descend_single(model: list[Any], gradients: list[Any]) -> None:
    for variable, gradient in zip(model, gradients, strict=True):
        variable.assign_sub(gradient)
