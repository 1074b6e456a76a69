"""Training on the ranks equals training in one process with all their batches together."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case

ROWS, FEATURES = 4, 3


def batch(rank: int, step: int = 0) -> tuple[Any, Any]:
    """Returns small integers, so that sums are exact."""
    numbers = np.random.default_rng(10 * rank + step).integers(-2, 3, (ROWS, FEATURES + 1)).astype(np.float64)
    return tf.constant(numbers[:, :FEATURES]), tf.constant(numbers[:, FEATURES:])


def all_batches(step: int = 0) -> tuple[Any, Any]:
    parts = [batch(rank, step) for rank in range(hvd.size())]
    return tuple(tf.concat(part, 0) for part in zip(*parts, strict=True))


def variables() -> list[Any]:
    return [
        tf.Variable(tf.ones([FEATURES, 2], tf.float64)),
        tf.Variable(tf.ones([2], tf.float64)),
        tf.Variable(tf.ones([2, 1], tf.float64)),
    ]


def loss_of(model: list[Any], inputs: Any, targets: Any) -> Any:
    hidden = tf.nn.relu(inputs @ model[0] + model[1])
    return tf.reduce_mean(tf.square(hidden @ model[2] - targets))


def descend(model: list[Any], gradients: list[Any]) -> None:
    for variable, gradient in zip(model, gradients, strict=True):
        variable.assign_sub(0.125 * gradient)


def trained_alone(steps: int) -> list[Any]:
    model = variables()
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = loss_of(model, *all_batches(step))
        descend(model, tape.gradient(loss, model))
    return model


def close(actual: list[Any], expected: list[Any]) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-12)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predivided": {"gradient_predivide_factor": 2.0},
    "two groups": {"num_groups": 2},
    "many groups": {"num_groups": 9},
}


@case(options=OPTIONS)
def with_a_tape(options: str) -> None:
    for is_function in (False, True):
        model = variables()

        def step(inputs: Any, targets: Any, model: list[Any] = model) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(model, inputs, targets)
            distributed = hvd.DistributedGradientTape(tape, **OPTIONS[options])
            assert isinstance(distributed, tf.GradientTape)
            descend(model, distributed.gradient(loss, model))

        run = tf.function(step) if is_function else step
        for number in range(4):
            run(*batch(hvd.rank(), number))
        close(model, trained_alone(4))


@case()
def a_tape_that_records_later_and_groups_of_variables() -> None:
    model = variables()
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True), groups=[model[:1], model[1:]]) as tape:
        loss = loss_of(model, *batch(hvd.rank()))
    found = tape.gradient(loss, {"a": model[0], "b": [model[1], model[2]]})
    with tf.GradientTape() as alone:
        loss = loss_of(model, *all_batches())
    close([found["a"], *found["b"]], alone.gradient(loss, model))


@case()
def gradients_that_are_none_or_sparse() -> None:
    table, unused = tf.Variable(tf.ones([4, 2])), tf.Variable(1.0)

    def gradients(**options: Any) -> list[Any]:
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, **options) as tape:
            loss = tf.reduce_sum(tf.gather(table, [0, 1]))
        return tape.gradient(loss, [table, unused])

    sparse, nothing = gradients()
    assert nothing is None
    assert isinstance(sparse, tf.IndexedSlices)
    dense, _ = gradients(sparse_as_dense=True)
    for result in (tf.convert_to_tensor(sparse), dense):
        assert result[:, 0].numpy().tolist() == [hvd.size(), hvd.size(), 0.0, 0.0]


@case()
def sources_of_this_rank_alone() -> None:
    own, shared = tf.Variable(1.0), tf.Variable(1.0)

    def gradients(**options: Any) -> list[float]:
        tape = hvd.DistributedGradientTape(tf.GradientTape(), **options)
        tape.register_local_source(own)
        with tape:
            loss = (own + shared) * float(hvd.rank())
        return [float(one) for one in tape.gradient(loss, [own, shared])]

    mean = (hvd.size() - 1) / 2
    assert gradients() == [pytest.approx(hvd.rank() / hvd.size()), mean]
    assert gradients(scale_local_gradients=False) == [hvd.rank(), mean]


@case(least=2)
def some_of_the_ranks() -> None:
    first = hvd.add_process_set([0])
    x = tf.Variable(float(hvd.rank()))
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, process_set=first) as tape:
        loss = x * x
    assert float(tape.gradient(loss, x)) == 2.0 * hvd.rank()
    hvd.remove_process_set(first)


@case()
def passes_that_add_up() -> None:
    for is_function in (False, True):
        model = variables()
        accumulator = hvd.GradientAccumulator(2, average_aggregated_gradients=True)

        def step(inputs: Any, targets: Any, model: list[Any] = model, accumulator: Any = accumulator) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(model, inputs, targets)
            found = tape.gradient(loss, model)
            return accumulator.add(found, lambda sums: descend(model, sums))

        run = tf.function(step) if is_function else step
        inputs, targets = batch(hvd.rank())
        due = [bool(run(inputs[half : half + 2], targets[half : half + 2])) for half in (0, 2)]
        assert due == [False, True]
        close(model, trained_alone(1))


@case()
def an_equal_start() -> None:
    mine = [tf.Variable(tf.fill([2], hvd.rank() + 1.0)), tf.Variable(hvd.rank())]
    hvd.broadcast_variables(mine, 0)
    assert [one.numpy().tolist() for one in mine] == [[1.0, 1.0], 0]
    tf.function(lambda: hvd.broadcast_variables(mine, 0, inplace=True))()


def norm_layer(kind: Any) -> Any:
    layer = kind(momentum=0.5, dtype="float64")
    layer.build((None, FEATURES))
    return layer


@case(layer=["of sirtaki", "of Keras"])
def batch_normalisation(layer: str) -> None:
    import keras

    if int(keras.__version__.partition(".")[0]) < 3:  # the Keras of TensorFlow up to 2.15
        with pytest.raises(ImportError, match="Keras 3"):
            hvd.SyncBatchNormalization()
        return

    def run(layer: Any, inputs: Any, scale: Any) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            result = layer(inputs, training=True)
            loss = tf.reduce_sum(result * result * result * scale)
        weights = [layer.gamma.value, layer.beta.value]
        return result, *tape.gradient(loss, [inputs, *weights])

    rows = [5 + rank for rank in range(hvd.size())]
    whole = tf.constant(np.random.default_rng(0).normal(3, 2, (sum(rows), FEATURES)))
    scale = tf.range(1.0, FEATURES + 1.0, dtype=tf.float64)
    begin = sum(rows[: hvd.rank()])
    mine = whole[begin : begin + rows[hvd.rank()]]
    plain = keras.layers.BatchNormalization
    kinds = {"of sirtaki": hvd.SyncBatchNormalization, "of Keras": partial(plain, synchronized=True)}
    own, alone = norm_layer(kinds[layer]), norm_layer(plain)
    result, for_inputs, for_gamma, for_beta = run(own, mine, scale)
    wanted, wanted_inputs, wanted_gamma, wanted_beta = run(alone, whole, scale)
    part = slice(begin, begin + rows[hvd.rank()])
    np.testing.assert_allclose(result, wanted[part], rtol=1e-9)
    np.testing.assert_allclose(for_inputs, wanted_inputs[part], rtol=1e-6, atol=1e-9)
    sums = hvd.grouped_allreduce([for_gamma, for_beta], op=hvd.Sum)
    np.testing.assert_allclose(sums[0], wanted_gamma, rtol=1e-9)
    np.testing.assert_allclose(sums[1], wanted_beta, rtol=1e-9)
    np.testing.assert_allclose(own.moving_variance, alone.moving_variance, rtol=1e-9)
    np.testing.assert_allclose(own(mine, training=False), alone(mine, training=False), rtol=1e-9)
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)


@case()
def batch_normalisation_with_a_mask() -> None:
    """Masked steps count on no rank, however many of them each rank has."""
    import keras

    if int(keras.__version__.partition(".")[0]) < 3:
        return
    rows = 2 * hvd.size()
    whole = tf.constant(np.random.default_rng(1).normal(3, 2, (rows, 4, FEATURES)))
    mask = np.random.default_rng(2).uniform(size=(rows, 4)) < np.linspace(0.2, 0.9, rows)[:, None]
    part = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
    own, alone = hvd.SyncBatchNormalization(dtype="float64"), keras.layers.BatchNormalization(dtype="float64")
    result = own(whole[part], training=True, mask=tf.constant(mask[part]))
    wanted = alone(whole, training=True, mask=tf.constant(mask))
    # Keras computes masked moments in float32.
    np.testing.assert_allclose(result, wanted[part], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(own.moving_mean, alone.moving_mean, rtol=1e-5)


@case()
def what_the_page_shows() -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "tensorflow.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), {"__name__": "__main__"})
        assert not hvd.is_initialized()


@case(is_compiled=(False, True))
def samples_that_count_alike(is_compiled: bool) -> None:
    """Ranks with other numbers of samples, one of them with none, divide sums by the number of all."""
    parts = [[tensor[: 2 * rank] for tensor in batch(rank)] for rank in range(hvd.size())]
    inputs, targets = parts[hvd.rank()]
    model, alone = variables(), variables()

    def step(inputs: Any, targets: Any) -> None:
        total = hvd.allreduce(tf.shape(inputs)[0], op=hvd.Sum)
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            hidden = tf.nn.relu(inputs @ model[0] + model[1])
            loss = tf.reduce_sum(tf.square(hidden @ model[2] - targets)) / tf.cast(total, tf.float64)
        descend(model, tape.gradient(loss, model))

    (tf.function(step) if is_compiled else step)(inputs, targets)
    with tf.GradientTape() as tape:
        loss = loss_of(alone, *(tf.concat(column, 0) for column in zip(*parts, strict=True)))
    descend(alone, tape.gradient(loss, alone))
    close(model, alone)
