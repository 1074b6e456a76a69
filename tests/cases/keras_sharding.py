"""Keras' optimizers with divided state: the bits of those without."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import sirtaki.keras as hvd
from cases import case
from cases.keras_models import BATCH, assert_alike, data_of, gradients_of, make_model, values_of
from sirtaki.bindings.errors import ParametersDifferError, UnsupportedError
from sirtaki.common.training.groups import Place


def without_decay_of_biases() -> Any:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": without_decay_of_biases,
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05, loss_scale_factor=8.0),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.02),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}


def divided(name: str) -> Any:
    return hvd.DistributedOptimizer(OPTIMIZERS[name](), shard="state")


def whole(name: str) -> Any:
    return hvd.DistributedOptimizer(OPTIMIZERS[name]())


def fitted(optimizer: Any, **options: Any) -> Any:
    """Returns a model trained for one epoch. Muon works in float32 only on TensorFlow."""
    model = make_model(dtype="float32")
    model.compile(optimizer, "mse", **options)
    model.fit(*data_of(hvd.rank()), batch_size=BATCH, shuffle=False, verbose=0)
    return model


def assert_equal(model: Any, other: Any) -> None:
    """Checks that weights, and the whole states of the optimizers, have the same bits."""
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    states = hvd.full_state_dict(model.optimizer), hvd.full_state_dict(other.optimizer)
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][key])


def has_dictionaries() -> bool:
    """Returns whether Muon keeps its state in dictionaries, as in older versions of Keras."""
    optimizer = keras.optimizers.Muon()
    optimizer.build(make_model().trainable_weights)
    return isinstance(optimizer.adam_velocities, dict)


@contextmanager
def shared_file() -> Iterator[str]:
    """Yields the path of a file of rank 0, which exists until all ranks have left."""
    with tempfile.TemporaryDirectory() as folder:
        yield hvd.broadcast_object(str(Path(folder) / "model.keras"))
        hvd.barrier()


def step_both(model: Any, other: Any, number: int) -> None:
    """Trains both models on this rank's batch of a step."""
    x, y = data_of(hvd.rank())
    for one in (model, other):
        one.train_on_batch(x[number * BATCH :][:BATCH], y[number * BATCH :][:BATCH])


@case(optimizer=list(OPTIMIZERS))
def same_bits(optimizer: str) -> None:
    if optimizer == "Muon" and has_dictionaries():
        pytest.skip("the Muon of this Keras is refused")
    model = fitted(divided(optimizer), run_eagerly=True)
    assert_equal(model, fitted(whole(optimizer), run_eagerly=True))
    assert not np.allclose(model.get_weights()[0], make_model().get_weights()[0])
    assert_alike(model.weights)


@case(optimizer=["Adam", "global_clipnorm"])
def same_bits_in_compiled_steps(optimizer: str) -> None:
    assert_equal(fitted(divided(optimizer)), fitted(whole(optimizer)))


@case(least=2)
def each_rank_has_its_part_of_the_state() -> None:
    model, other = fitted(divided("Adam")), fitted(whole("Adam"))
    own, counts = (sum(map(np.size, values_of(one.optimizer.variables))) for one in (model, other))
    shared = 2  # the number of steps, and the learning rate
    parts = hvd.allgather_object(int(own - shared))
    assert sum(parts) == counts - shared
    assert max(parts) <= (counts - shared) / hvd.size() + 3 * 12  # three moments of the largest variable


@case()
def some_variables_without_a_gradient() -> None:
    """A rank all of whose variables have none counts the step nevertheless."""
    models = make_model(), make_model()
    for model, optimizer in zip(models, (divided("Adam"), whole("Adam")), strict=True):
        model.compile(optimizer, "mse")
        for kept in (0, 1, 0):
            gradients = gradients_of(model, *data_of(hvd.rank()))
            only = [one if index == kept else None for index, one in enumerate(gradients)]
            optimizer.apply(only, model.trainable_weights)
    assert_equal(*models)


@case()
def a_step_without_any_gradient_is_refused() -> None:
    model = make_model()
    model.compile(divided("Adam"), "mse")
    with pytest.raises(ValueError, match="no rank has computed a gradient"):
        model.optimizer.apply([None] * len(model.trainable_weights), model.trainable_weights)


@case()
def fewer_variables_than_ranks() -> None:
    models = []
    for optimizer in (divided("momentum"), whole("momentum")):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.ones((3, 1))])
        model.compile(optimizer, "mse", run_eagerly=True)
        model.fit(*data_of(hvd.rank()), batch_size=BATCH, shuffle=False, verbose=0)
        models.append(model)
    assert_equal(*models)


@case()
def a_constraint() -> None:
    """It holds for what all ranks get."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_constraint="non_neg")])
    model.set_weights([np.ones((3, 2)), np.zeros(2)])
    model.compile(divided("SGD"), "mse", run_eagerly=True)
    x, _ = data_of(hvd.rank())
    model.train_on_batch(np.abs(x[:BATCH]), np.full((BATCH, 2), -100.0))
    assert model.get_weights()[0].min() == 0
    assert_alike(model.weights)


@case()
def a_file_and_back() -> None:
    """The file is that of the plain model; its state is divided again, on any number of ranks."""
    model, other = (fitted(make("Adam"), run_eagerly=True) for make in (divided, whole))
    with shared_file() as path:
        hvd.save_model(model, path)
        plain, again = keras.models.load_model(path), hvd.load_model(path, shard="state")
    for expected, found in zip(
        values_of(other.optimizer.variables), values_of(plain.optimizer.variables), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    assert len(again.optimizer.variables) == len(model.optimizer.variables)
    step_both(again, other, 0)
    assert_equal(again, other)


@case(least=2)
def a_state_that_is_loaded_by_all_ranks() -> None:
    model, other = (fitted(make("global_clipnorm"), run_eagerly=True) for make in (divided, whole))
    state = hvd.full_state_dict(model.optimizer)
    again = fitted(divided("global_clipnorm"), run_eagerly=True)
    again.set_weights(model.get_weights())
    again.optimizer.load_own_variables(state)
    step_both(again, other, 1)
    assert_equal(again, other)
    with pytest.raises(ValueError, match="does not fit an optimizer of"):
        model.optimizer.load_own_variables({"0": state["0"]})


@case(optimizer=["momentum", "AdamW", "RMSprop", "Ftrl", "Lamb", "Muon", "Adafactor"], least=2)
def a_division_for_other_ranks_and_back(optimizer: str) -> None:
    """As when the ranks of an elastic job change: the state is made anew, and filled."""
    if optimizer == "Muon" and has_dictionaries():
        pytest.skip("the Muon of this Keras is refused")
    model, other = (fitted(make(optimizer), run_eagerly=True) for make in (divided, whole))
    state, divided_for = hvd.full_state_dict(model.optimizer), model.optimizer.place
    model.optimizer.divide_for(Place(0, 1))
    shapes = [tuple(variable.shape) for variable in model.optimizer.variables]
    assert shapes == [tuple(variable.shape) for variable in other.optimizer.variables]
    model.optimizer.divide_for(divided_for)
    model.optimizer.load_own_variables(state)
    step_both(model, other, 1)
    assert_equal(model, other)


@case(least=2)
def a_broadcast_leaves_each_rank_its_part() -> None:
    model, other = (fitted(make("momentum"), run_eagerly=True) for make in (divided, whole))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    data = data_of(hvd.rank())
    for one in (model, other):
        one.fit(*data, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[callback])
    hvd.check_parameters(model)
    assert_equal(model, other)
    if hvd.rank() == 1:
        model.optimizer.iterations.assign(0)
    with pytest.raises(ValueError, match="has taken 0 steps on rank 1, and 8 on rank 0"):
        hvd.broadcast_model(model)


@case(least=2)
def unequal_starts_are_refused() -> None:
    """The first step would make the variables equal. Compiled steps are not checked."""
    model = make_model(seed=hvd.rank())
    optimizer = divided("Adam")
    gradients = gradients_of(model, *data_of(hvd.rank()))
    with pytest.raises(ParametersDifferError, match="broadcast_model"):
        optimizer.apply(gradients, model.trainable_weights)


@case(least=2)
def a_part_is_not_saved_as_the_whole() -> None:
    model = fitted(divided("Adam"), run_eagerly=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        with pytest.raises(UnsupportedError, match=r"hvd\.save_model\(model, path\) on all ranks"):
            model.save(path)


@case()
def the_best_model_has_the_whole_state() -> None:
    with shared_file() as path:
        callback = hvd.callbacks.BestModelCheckpoint(path, monitor="loss")
        model = make_model()
        model.compile(divided("Adam"), "mse", run_eagerly=True)
        model.fit(*data_of(0), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[callback])
        plain = keras.models.load_model(path)
    state = hvd.full_state_dict(model.optimizer)
    for expected, found in zip(state.values(), values_of(plain.optimizer.variables), strict=True):
        np.testing.assert_array_equal(found, expected)


def scaled() -> Any:
    inner = keras.optimizers.SGD()
    return hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner), shard="state")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a way": (lambda: hvd.DistributedOptimizer(OPTIMIZERS["SGD"](), shard="gradients"), 'has to be "state"'),
    "Nadam": (lambda: hvd.DistributedOptimizer(keras.optimizers.Nadam(), shard="state"), "and not Nadam"),
    "a loss scale": (scaled, "and not LossScaleOptimizer"),
    "a subclass": (
        lambda: hvd.DistributedOptimizer(type("Own", (keras.optimizers.SGD,), {})(), shard="state"),
        "and not Own",
    ),
    "an average": (
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(use_ema=True), shard="state"),
        "use_ema needs the averages",
    ),
    "passes": (
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2, shard="state"),
        "gradients of several passes",
    ),
    "a process set": (
        lambda: hvd.DistributedOptimizer(
            keras.optimizers.SGD(), process_set=hvd.ProcessSet([0]), shard="state"
        ),
        "leave out process_set",
    ),
}


@case(what=list(REFUSED))
def other_arguments_are_refused(what: str) -> None:
    call, text = REFUSED[what]
    with pytest.raises(ValueError, match=text):
        call()


@case(least=2)
def variables_of_one_rank_are_refused() -> None:
    model = make_model()
    layer = model.layers[-1]
    optimizer = hvd.PartialDistributedOptimizer(OPTIMIZERS["SGD"](), local_layers=[layer], shard="state")
    with pytest.raises(ValueError, match="register_local_var and local_layers"):
        optimizer.apply(gradients_of(model, *data_of(0)), model.trainable_weights)


@case(least=2)
def a_loss_scale_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="auto_scale_loss=False"):
        keras.optimizers.LossScaleOptimizer(divided("SGD"))


@case(least=2)
def a_rank_that_has_joined_cannot_send_its_variables() -> None:
    model = make_model()
    optimizer = divided("SGD")
    if hvd.rank() != hvd.size() - 1:
        with pytest.raises(Exception, match="has joined and has nothing to send as the root"):
            optimizer.apply(gradients_of(model, *data_of(0)), model.trainable_weights)
    hvd.join()


@case(least=2)
def state_of_unknown_variables_is_refused() -> None:
    model = make_model()
    for is_built in (False, True):
        optimizer = keras.optimizers.SGD()
        optimizer.extra = keras.Variable(np.zeros(3), name="extra")
        if is_built:
            optimizer.build(model.trainable_weights)
        with pytest.raises(UnsupportedError, match=r"cannot divide .*extra"):
            hvd.DistributedOptimizer(optimizer, shard="state").build(model.trainable_weights)


@case(least=2)
def other_variables_are_refused() -> None:
    """Nothing is exchanged then."""
    model, other = make_model(), make_model()
    optimizer = divided("SGD")
    optimizer.apply(gradients_of(model, *data_of(0)), model.trainable_weights)
    with pytest.raises(ValueError, match="was built for other variables than"):
        optimizer.apply(gradients_of(other, *data_of(0)), other.trainable_weights)
