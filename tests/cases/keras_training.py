"""Training with Keras: the ranks together equal one process with all their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import sirtaki.keras as hvd
from cases import case
from cases.keras_models import (
    BATCH,
    STEPS,
    assert_alike,
    assert_close,
    assert_trained_as_one,
    data_of,
    data_of_all,
    gradients_of,
    make_model,
)

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.02),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=2),
    "incomplete accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
    "loss scale": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}


@case(optimizer=list(OPTIMIZERS))
def eager_fit(optimizer: str) -> None:
    assert_trained_as_one(OPTIMIZERS[optimizer], run_eagerly=True)


@case(optimizer=["Adam", "accumulation", "incomplete accumulation"])
def compiled_fit(optimizer: str) -> None:
    assert_trained_as_one(OPTIMIZERS[optimizer], run_eagerly=False)


@case()
def compiled_by_xla() -> None:
    if keras.backend.backend() != "tensorflow":
        pytest.skip("torch has another compiler, and JAX's programs are XLA's anyway")
    from sirtaki.tensorflow.ops.xla import enable_xla, is_served

    if not is_served():
        pytest.skip("this TensorFlow's XLA is not served, as the adapter's own tests show")
    enable_xla()
    assert_trained_as_one(OPTIMIZERS["Adam"], jit_compile=True)


@case(as_dense=[True, False])
def an_embedding(as_dense: bool) -> None:
    """Its gradient is sparse on TensorFlow; ranks have different rows, and some rows in common."""

    def trained(optimizer: Any, words: Any, eagerly: bool) -> Any:
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 3), keras.layers.Flatten()]
        )
        model.set_weights([np.arange(27.0).reshape(9, 3) / 9])
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        model.fit(words, np.ones((len(words), 6)), batch_size=len(words) // 2, shuffle=False, verbose=0)
        return model

    parts = [np.random.default_rng(rank).integers(0, 9, size=(2, 3, 2)) for rank in range(hvd.size())]
    alone = trained(keras.optimizers.Adam(0.1), np.stack(parts, axis=1).reshape(-1, 2), True)
    distributed = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.1),
        sparse_as_dense=as_dense,
        gradient_predivide_factor=2.0,
        compression=hvd.Compression.none if as_dense else hvd.Compression.fp16,
    )
    together = trained(distributed, parts[hvd.rank()].reshape(-1, 2), not as_dense)
    if as_dense or keras.backend.backend() == "tensorflow":  # rows are not compressed
        assert_close(together, alone)
    assert_alike(together.weights)


@case(least=2)
def an_embedding_that_stays_on_a_rank() -> None:
    """Its sparse gradient is divided by the number of ranks, as the dense ones are."""
    layer = keras.layers.Embedding(4, 2)
    model = keras.Sequential([keras.Input((1,), dtype="int32"), layer, keras.layers.Flatten()])
    model.set_weights([np.zeros((4, 2))])
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(2.0), local_layers=[layer])
    model.compile(optimizer, "mse", run_eagerly=True)
    model.train_on_batch(np.full((1, 1), hvd.rank()), np.ones((1, 2)))
    expected = np.zeros((4, 2))
    expected[hvd.rank()] = 2.0 / hvd.size()  # the rate times the derivative of the mean of two squares
    np.testing.assert_array_equal(model.get_weights()[0], expected)


@case()
def several_steps_an_execution() -> None:
    if keras.backend.backend() == "tensorflow":  # the other backends take one step at a time only
        assert_trained_as_one(OPTIMIZERS["momentum"], steps_per_execution=2)


@case(eagerly=[True, False])
def synchronized_batch_normalisation(eagerly: bool) -> None:
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras has it on TensorFlow only, and says so")

    def trained(optimizer: Any, data: tuple[Any, Any], batch_size: int) -> Any:
        first, last = make_model().layers
        layer = keras.layers.BatchNormalization(synchronized=batch_size == BATCH, dtype="float64")
        model = keras.Sequential([keras.Input((3,)), first, layer, last])
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        model.fit(*data, batch_size=batch_size, shuffle=False, verbose=0)
        return model

    alone = trained(keras.optimizers.SGD(0.1), data_of_all(), BATCH * hvd.size())
    together = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), data_of(hvd.rank()), BATCH)
    assert_close(together, alone)


@case(least=2)
def synchronized_among_more_ranks_than_train_together() -> None:
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras has it on TensorFlow only, and says so")
    first = hvd.add_process_set([0])
    layer = keras.layers.BatchNormalization(synchronized=True, name="normal")
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=first), "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ValueError, match="layer 'normal' has synchronized=True"):
        model.fit(*data_of(0), verbose=0, callbacks=[callback])
    hvd.remove_process_set(first)


@case(average=[True, False])
def passes_that_add_up(average: bool) -> None:
    """Their mean equals Keras' own accumulation; their sum multiplies the rate by the number of passes."""
    rate = 0.1 if average else 0.2

    def distribute(optimizer: Any) -> Any:
        optimizer.learning_rate = 0.1
        optimizer.gradient_accumulation_steps = None
        return hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=2, average_aggregated_gradients=average
        )

    assert_trained_as_one(
        lambda: keras.optimizers.SGD(rate, gradient_accumulation_steps=2), distribute, run_eagerly=True
    )


@case()
def train_on_batch() -> None:
    alone, together = make_model(), make_model()
    alone.compile(keras.optimizers.Adam(0.01), "mse")
    together.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    (x, y), (all_x, all_y), rows = data_of(hvd.rank()), data_of_all(), BATCH * hvd.size()
    for step in range(STEPS):
        together.train_on_batch(x[step * BATCH :][:BATCH], y[step * BATCH :][:BATCH])
        alone.train_on_batch(all_x[step * rows :][:rows], all_y[step * rows :][:rows])
    assert_close(together, alone)


@case(call=["apply", "apply_gradients"])
def a_loop_of_ones_own(call: str) -> None:
    alone, together = make_model(), make_model()
    plain = keras.optimizers.Adam(0.01)
    distributed = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    (x, y), (all_x, all_y), rows = data_of(hvd.rank()), data_of_all(), BATCH * hvd.size()
    for step in range(STEPS):
        for model, optimizer, batch in (
            (together, distributed, (x[step * BATCH :][:BATCH], y[step * BATCH :][:BATCH])),
            (alone, plain, (all_x[step * rows :][:rows], all_y[step * rows :][:rows])),
        ):
            gradients = gradients_of(model, *batch)
            if call == "apply":
                optimizer.apply(gradients, model.trainable_weights)
            else:
                optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    assert_close(together, alone)
    assert_alike(together.weights)


@case()
def an_optimizer_that_has_been_used() -> None:
    """The optimizer keeps its momentum, and stays the same object."""
    model = make_model()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.apply(gradients_of(model, *data_of(0)), model.trainable_weights)
    before = [keras.ops.convert_to_numpy(one) for one in optimizer.variables]
    distributed = hvd.DistributedOptimizer(optimizer)
    assert distributed is optimizer
    assert isinstance(distributed, keras.optimizers.SGD)
    assert type(distributed).__name__ == "SGD"
    for one, value in zip(distributed.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), value)
    distributed.apply(gradients_of(model, *data_of(hvd.rank())))
    assert_alike(model.weights)


@case(least=2)
def some_of_the_ranks() -> None:
    """The ranks of a process set train together, each other rank trains alone."""
    first = hvd.add_process_set([0])
    try:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=first)
        optimizer.apply(gradients_of(model, *data_of(hvd.rank())), model.trainable_weights)
        plain = make_model()
        keras.optimizers.SGD(0.1).apply(gradients_of(plain, *data_of(hvd.rank())), plain.trainable_weights)
        for expected, found in zip(plain.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(found, expected)
    finally:
        hvd.remove_process_set(first)


def tagged(loss: Any, masks: bool) -> Any:
    """Returns a model of two outputs for each of four words, of which it leaves out words 0 if it `masks`."""
    words = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Embedding(9, 3, mask_zero=masks)(words)
    model = keras.Model(words, [keras.layers.Dense(1, name=name)(hidden) for name in ("first", "second")])
    model.set_weights([np.linspace(-1, 1, one.size).reshape(one.shape) for one in model.get_weights()])
    model.compile(*loss)
    return model


LOSSES: dict[str, tuple[dict[str, Any], bool, bool]] = {  # arguments, whether words are masked or weighted
    "sum": ({"reduction": "sum"}, False, True),
    "no reduction": ({"reduction": None}, False, True),
    "mean by weights under a mask": ({"reduction": "mean_with_sample_weight"}, True, True),
    "mean under a mask": ({}, True, False),
    "weighted mean under a mask": ({}, True, True),
}


@case(how=list(LOSSES), least=2)
def losses_that_are_no_means_over_rows(how: str) -> None:
    """Ranks have different numbers of words and sums of weights; the last rank may have none in a batch."""
    arguments, masks, weighs = LOSSES[how]
    if how == "no reduction" and keras.backend.backend() != "tensorflow":
        pytest.skip("the other backends want one number")
    generator = np.random.default_rng(0)
    rows, size = BATCH * hvd.size(), hvd.size()
    words = generator.integers(0, 9, (STEPS * rows, 4)) * (generator.random((STEPS * rows, 4)) < 0.5)
    words[rows - BATCH : rows] = 0
    y, weights = generator.normal(size=(2, *words.shape, 1)), generator.random((2, *words.shape))
    data = words, list(y), list(weights) if weighs else None
    mine = np.arange(STEPS * rows).reshape(STEPS, size, BATCH)[:, hvd.rank()].ravel()

    def trained(optimizer: Any, chosen: Any, batch_size: int) -> tuple[Any, float]:
        loss = [keras.losses.MeanSquaredError(**arguments), keras.losses.MeanAbsoluteError(**arguments)]
        model = tagged((optimizer, loss), masks)
        x, targets, given = keras.tree.map_structure(lambda one: None if one is None else one[chosen], data)
        average = [hvd.callbacks.MetricAverageCallback()] if batch_size == BATCH else []
        options = {"shuffle": False, "verbose": 0, "callbacks": average}
        history = model.fit(x, targets, batch_size, sample_weight=given, **options).history
        model.evaluate(x[:BATCH], [one[:BATCH] for one in targets], verbose=0)  # exchanges nothing
        return model, history["loss"][0]

    alone, loss = trained(keras.optimizers.SGD(0.05), np.arange(STEPS * rows), rows)
    together, found = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), mine, BATCH)
    assert_close(together, alone)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
