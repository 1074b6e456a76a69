"""Training in sessions of TensorFlow 1: the ranks together do what one process does with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case

v1 = tf.compat.v1
ROWS, STEPS = 3, 4  # of each rank in each step
RATE, MOMENTUM = 0.125, 0.5  # exact in the 32 bits in which the optimizers keep them
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "descent": lambda: v1.train.GradientDescentOptimizer(RATE),
    "momentum": lambda: v1.train.MomentumOptimizer(RATE, MOMENTUM),
    "adam": lambda: v1.train.AdamOptimizer(RATE),
}


def batches(ranks: range) -> list[tuple[Any, Any]]:
    """Returns the inputs and targets of each step, of these ranks together."""
    steps = []
    for step in range(STEPS):
        parts = [np.random.default_rng([step, rank]).standard_normal((ROWS, 4)) for rank in ranks]
        inputs = np.concatenate(parts)
        steps.append((inputs, np.sin(inputs.sum(1, keepdims=True))))
    return steps


def weights_of(rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal((4, 1))


def model(start: Any, uses_resource: bool = True) -> tuple[Any, Any, Any]:
    """Returns the weights, and the loss of inputs and targets that are fed, under these names."""
    weights = v1.Variable(start, use_resource=uses_resource, name="weights")
    inputs = v1.placeholder(tf.float64, (None, 4), "inputs")
    targets = v1.placeholder(tf.float64, (None, 1), "targets")
    return weights, tf.reduce_mean(tf.square(inputs @ weights - targets)), (inputs, targets)


def in_one_process(optimizer: Callable[[], Any], root: int) -> Any:
    """Returns the weights after steps of a plain optimizer over the batches of all ranks."""
    with tf.Graph().as_default(), v1.Session() as session:
        weights, loss, fed = model(weights_of(root))
        step = optimizer().minimize(loss)
        session.run(v1.global_variables_initializer())
        for batch in batches(range(hvd.size())):
            session.run(step, dict(zip(fed, batch, strict=True)))
        return session.run(weights)


@case(optimizer=OPTIMIZERS)
def a_training_session_equals_one_process(optimizer: str) -> None:
    root = hvd.size() - 1
    with tf.Graph().as_default():
        weights, loss, fed = model(weights_of(hvd.rank()))
        count = v1.train.get_or_create_global_step()
        distributed = hvd.DistributedOptimizer(OPTIMIZERS[optimizer]())
        assert isinstance(distributed, type(OPTIMIZERS[optimizer]()))
        step = distributed.minimize(loss, global_step=count)
        hooks = [hvd.BroadcastGlobalVariablesHook(root)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for batch in batches(range(hvd.rank(), hvd.rank() + 1)):
                session.run(step, dict(zip(fed, batch, strict=True)))
            found, steps = session.run([weights, count])
    assert steps == STEPS
    np.testing.assert_allclose(found, in_one_process(OPTIMIZERS[optimizer], root), rtol=1e-12)


@case(uses_resource=[True, False])
def a_loop_of_its_own_equals_one_process(uses_resource: bool) -> None:
    """Clips between the two halves of a step, and covers both kinds of variables."""
    with tf.Graph().as_default(), v1.Session() as session:
        weights, loss, fed = model(weights_of(hvd.rank()), uses_resource)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), op=hvd.Sum)
        pairs = optimizer.compute_gradients(loss)
        step = optimizer.apply_gradients([(gradient / hvd.size(), one) for gradient, one in pairs])
        start = hvd.broadcast_global_variables(0)
        session.run(v1.global_variables_initializer())
        session.run(start)
        for batch in batches(range(hvd.rank(), hvd.rank() + 1)):
            session.run(step, dict(zip(fed, batch, strict=True)))
        np.testing.assert_allclose(
            session.run(weights), in_one_process(OPTIMIZERS["momentum"], 0), rtol=1e-12
        )


@case(averages=[False, True])
def passes_add_up_on_the_rank(averages: bool) -> None:
    """Steps in every second pass, with the sum or the mean of both; the other passes are only counted."""
    with tf.Graph().as_default(), v1.Session() as session:
        weights, loss, fed = model(weights_of(0))
        unused = v1.Variable(1.0)
        count = v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](), backward_passes_per_step=2, average_aggregated_gradients=averages
        )
        step = optimizer.minimize(loss, global_step=count, var_list=[weights, unused])
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        expected, velocity, total = weights_of(0), np.zeros((4, 1)), np.zeros((4, 1))
        everyone = batches(range(hvd.size()))
        for number, batch in enumerate(batches(range(hvd.rank(), hvd.rank() + 1)), 1):
            session.run(step, dict(zip(fed, batch, strict=True)))
            inputs, targets = everyone[number - 1]
            total += 2 * inputs.T @ (inputs @ expected - targets) / len(inputs)
            if number % 2 == 0:
                velocity = MOMENTUM * velocity + total / (2 if averages else 1)
                expected = expected - RATE * velocity
                total = np.zeros((4, 1))
            found, steps = session.run([weights, count])
            np.testing.assert_allclose(found, expected, rtol=1e-12)
            assert steps == number


@case(uses_resource=[True, False])
def adasum_combines_the_changes(uses_resource: bool) -> None:
    """Changes in different directions add up, and equal ones are made once."""
    with tf.Graph().as_default(), v1.Session() as session:
        own = np.zeros(hvd.size())
        own[hvd.rank()] = hvd.rank() + 1.0
        apart = v1.Variable(np.zeros(hvd.size()), use_resource=uses_resource)
        alike = v1.Variable(np.zeros(3), use_resource=uses_resource)
        loss = tf.reduce_sum(apart * own) + tf.reduce_sum(alike)
        step = hvd.DistributedOptimizer(OPTIMIZERS["descent"](), op=hvd.Adasum).minimize(loss)
        session.run(v1.global_variables_initializer())
        for number in (1, 2):
            session.run(step)
            found = session.run([apart, alike])
            np.testing.assert_allclose(found[0], -RATE * number * (np.arange(hvd.size()) + 1.0), rtol=1e-12)
            np.testing.assert_allclose(found[1], np.full(3, -RATE * number), rtol=1e-12)


@case()
def slices_of_a_table() -> None:
    for is_dense in (False, True):
        with tf.Graph().as_default(), v1.Session() as session:
            table = v1.Variable(np.ones((4, 2)))
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank() % 4]))
            optimizer = hvd.DistributedOptimizer(
                OPTIMIZERS["descent"](), op=hvd.Sum, sparse_as_dense=is_dense
            )
            step = optimizer.minimize(loss)
            session.run(v1.global_variables_initializer())
            session.run(step)
            counts = np.bincount(np.arange(hvd.size()) % 4, minlength=4)
            np.testing.assert_allclose(
                session.run(table), 1 - RATE * np.stack([counts, counts], 1), rtol=1e-12
            )


@case(least=2)
def variables_of_the_rank_and_sets_of_ranks() -> None:
    some = hvd.add_process_set([0])
    with tf.Graph().as_default(), v1.Session() as session:
        shared, own, single = (v1.Variable(0.0, dtype=tf.float64) for _ in range(3))
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["descent"](), op=hvd.Average)
        optimizer.register_local_var(own)
        alone = hvd.DistributedOptimizer(OPTIMIZERS["descent"](), process_set=some)
        steps = [
            optimizer.minimize((hvd.rank() + 1.0) * (shared + own), var_list=[shared, own]),
            alone.minimize((hvd.rank() + 1.0) * single, var_list=[single]),
        ]
        session.run(v1.global_variables_initializer())
        session.run(steps)
        expected = [(hvd.size() + 1) / 2, (hvd.rank() + 1) / hvd.size(), hvd.rank() + 1]
        np.testing.assert_allclose(session.run([shared, own, single]), -RATE * np.array(expected), rtol=1e-12)


@case()
def eager_steps_are_combined_as_well() -> None:
    variable = tf.Variable(0.0, dtype=tf.float64)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["descent"]())
    for _ in range(2):
        optimizer.minimize(lambda: (hvd.rank() + 1.0) * variable, var_list=[variable])
    assert float(variable) == pytest.approx(-RATE * (hvd.size() + 1), rel=1e-12)


@case()
def objects_by_a_function() -> None:
    send = hvd.broadcast_object_fn(root_rank=hvd.size() - 1, name="an object")
    assert [send({"rank": hvd.rank(), "number": number}) for number in range(2)] == [
        {"rank": hvd.size() - 1, "number": number} for number in range(2)
    ]
    with tf.Graph().as_default(), v1.Session() as session:
        assert hvd.broadcast_object(hvd.rank(), 0, session=session) == 0
        assert hvd.allgather_object(hvd.rank(), session=session) == list(range(hvd.size()))
