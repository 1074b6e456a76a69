"""KerasState: which variables are equal, sent, or each rank's own; with ranks as threads, on torch.

`test_keras_state.py` runs these tests in a process of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from world import world

import sirtaki.keras as hvd
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.bindings.survivors import Survivors
from sirtaki.common.elastic.state import GenerationStart
from sirtaki.keras.elastic import KerasState, TensorFlowKerasState

assert keras.backend.backend() == "torch"


def make_model(units: int = 3) -> Any:
    return keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(units, name="first"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(1),
        ]
    )


def compiled(optimizer: Any, units: int = 3) -> Any:
    model = make_model(units)
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
    return model


def train(model: Any, steps: int, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    for _ in range(steps):
        model.train_on_batch(numbers.normal(size=(4, 2)), numbers.normal(size=(4, 1)))


def values(variables: list[Any]) -> list[Any]:
    return [keras.ops.convert_to_numpy(one) for one in variables]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def are_equal(found: list[Any], expected: list[Any]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def on_ranks(size: int, body: Callable[[], None]) -> list[str]:
    """Returns the warnings about arrays that were replaced."""
    told: list[str] = []
    with warnings.catch_warnings(), world(size) as made:
        warnings.showwarning = lambda message, *_, **__: told.append(str(message))
        warnings.simplefilter("always")
        for context in made.contexts:
            context.survivors = Survivors()
        made.run(body)
    return [text for text in told if "whose values replace them" in text]


def receive(state: KerasState, *, is_current: bool, all_current: bool = False) -> None:
    state.receive(GenerationStart(current(), is_current, all_current))


def shared_with_all(value: Any) -> list[Any]:
    return hvd.allgather_object(value)


def test_a_commit_has_everything() -> None:
    model = compiled(keras.optimizers.Adam(0.1))
    train(model, 3, 0)
    state = KerasState(model, epoch=1)
    everything = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = values(everything)
    train(model, 2, 1)
    model.optimizer.learning_rate = 0.5
    state.epoch = 2
    assert not are_equal(values(everything), before)
    state.restore()
    assert_equal(values(everything), before)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    assert int(model.optimizer.iterations) == 3
    assert state.epoch == 1


def test_a_model_that_is_not_built_is_refused() -> None:
    for make in (KerasState, TensorFlowKerasState):
        with pytest.raises(ValueError, match=r"keras\.Input"):
            make(keras.Sequential([keras.layers.Dense(1)]))


def test_an_optimizer_without_variables_is_built() -> None:
    model = make_model()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    assert not optimizer.built
    state = KerasState(model, optimizer)
    assert optimizer.built
    assert state.optimizer is optimizer
    assert sum("momentum" in entry.name for entry in state._entries()) == len(model.trainable_variables)


def test_a_rank_that_joins_gets_weights_and_optimizer_and_keeps_what_is_its_own() -> None:
    def body() -> None:
        rank = hvd.rank()
        model = compiled(keras.optimizers.Adam(0.1))
        model.layers[2].seed_generator.state.assign([7, rank])
        train(model, 3 if rank == 0 else 1, rank)
        if rank == 0:
            model.optimizer.learning_rate = 0.25
        seeds = [one for one in model.variables if "seed" in one.path]
        own = values([*seeds, *model.metrics_variables])
        assert len(seeds) == 1
        state = KerasState(model, epoch=5 - rank)
        receive(state, is_current=rank == 0)
        assert_equal(values([*seeds, *model.metrics_variables]), own)
        weights = values([*model.weights, *model.optimizer.variables])
        assert all(are_equal(theirs, weights) for theirs in shared_with_all(weights))
        assert float(model.optimizer.learning_rate) == 0.25
        assert int(model.optimizer.iterations) == 3
        assert state.epoch == 5

    on_ranks(2, body)


def test_moving_statistics_may_differ_and_weights_may_not() -> None:
    def body() -> None:
        rank = hvd.rank()
        model = compiled(keras.optimizers.SGD(0.1))
        moving = model.layers[1].moving_mean
        moving.assign(np.full(3, float(rank)))
        for one in model.trainable_variables:
            one.assign(np.ones(one.shape))
        state = KerasState(model)
        if rank and has_damage:
            model.trainable_variables[0].assign(np.full((2, 3), 1.5))
        receive(state, is_current=True, all_current=True)
        assert (values(model.trainable_variables)[0] == 1.0).all()
        assert values([moving])[0].tolist() == [float(rank)] * 3

    has_damage = False
    assert on_ranks(2, body) == []
    has_damage = True
    (text,) = on_ranks(2, body)
    assert "first/kernel' on rank 1" in text
    assert "by up to 0.5" in text


def test_models_that_do_not_match_are_refused() -> None:
    def body() -> None:
        state = KerasState(compiled(keras.optimizers.SGD(0.1), 3 + hvd.rank()))
        with pytest.raises(ParametersDifferError, match="first/kernel"):
            receive(state, is_current=hvd.rank() == 0)

    on_ranks(2, body)


def test_accumulated_gradients_stay_on_the_rank() -> None:
    def body() -> None:
        rank = hvd.rank()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
        model = compiled(optimizer)
        for one in model.weights:
            one.assign(np.ones(one.shape))
        train(model, 1, rank)
        state = KerasState(model)
        sums = optimizer._accumulated_gradients
        mine = values(sums)
        assert any(one.any() for one in mine)
        receive(state, is_current=True, all_current=True)
        assert_equal(values(sums), mine)
        receive(state, is_current=rank == 0)
        assert_equal(values(sums), [np.zeros_like(one) for one in mine] if rank else mine)

    assert on_ranks(2, body) == []


def test_variables_of_a_rank_stay_its_own_with_their_momentum() -> None:
    def body() -> None:
        rank = hvd.rank()
        layer = keras.layers.Dense(2, name="of_this_rank")
        model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(2, name="of_all")])
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), local_layers=[layer]
        )
        model.compile(optimizer, "mse")
        state = KerasState(model)
        own = [one for one in optimizer.variables if "of_this_rank" in one.path] + layer.weights
        common = [one for one in optimizer.variables if "of_all" in one.path] + model.layers[1].weights
        assert (len(own), len(common)) == (4, 4)
        for one in (*own, *common):
            one.assign(np.full(one.shape, rank + 1.0))
        receive(state, is_current=rank == 0)
        assert all((one == rank + 1.0).all() for one in values(own))
        assert all((one == 1.0).all() for one in values(common))

    on_ranks(2, body)


def test_a_scaled_loss_belongs_to_the_state() -> None:
    def body() -> None:
        rank = hvd.rank()
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=2.0 ** (rank + 3)
        )
        model = compiled(optimizer)
        state = KerasState(model)
        receive(state, is_current=rank == 0)
        assert float(optimizer.dynamic_scale) == 8.0
        assert sum("momentum" in one.name for one in state._entries()) == len(model.trainable_variables)

    on_ranks(2, body)


def test_elements_of_16_bits() -> None:
    def body() -> None:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, dtype="bfloat16")])
        state = KerasState(model)
        for one in model.weights:
            one.assign(np.full(one.shape, 1.5 + hvd.rank()))
        receive(state, is_current=hvd.rank() == 0)
        assert all((one == 1.5).all() for one in values(model.weights))
        assert {entry.dtype.name for entry in state._entries()} == {"bfloat16"}

    on_ranks(2, body)


def test_a_state_has_one_dataset() -> None:
    def body() -> None:
        model = compiled(keras.optimizers.SGD(0.1))
        data = [hvd.shard_arrays(np.arange(4.0)[:, None]) for _ in range(2)]
        state = KerasState(model, batch=0, first=data[0], second=data[1])
        callback = hvd.elastic.UpdateBatchStateCallback(state)
        callback.set_model(model)
        with pytest.raises(ValueError, match="several datasets"):
            callback.on_train_begin()

    on_ranks(1, body)


@pytest.mark.parametrize("uneven", ["pad", "drop"])
@pytest.mark.parametrize("sizes", [(1, 2, 1, 3), (3, 2, 4), (4, 1), (2, 2)])
def test_the_rest_of_an_epoch_is_dealt_to_any_number_of_ranks(sizes: tuple[int, ...], uneven: Any) -> None:
    """Each sample is in one batch of one rank; the last world pads, or drops less than one a rank."""
    count, batch_size, steps = 50, 2, 3
    taken: list[int] = []
    state: dict[str, Any] = {}
    for number, size in enumerate(sizes):
        is_last = number == len(sizes) - 1

        def body(state: dict[str, Any] = state, is_last: bool = is_last) -> tuple[list[int], Any]:
            data = hvd.shard_arrays(np.arange(count), batch_size=batch_size, uneven=uneven)
            data.count()
            if state:
                data.load_state_dict(state)
            last = len(data) if is_last else data.skipped + steps
            batches = [data[index][0] for index in range(last)]
            assert len(batches[0]) == batch_size  # also a batch that is skipped
            mine = [int(one) for batch in batches[data.skipped :] for one in batch]
            data.record(last)
            return mine, data.state_dict()

        with world(size) as made:
            results = made.run(body)
        taken += [one for mine, _ in results for one in mine]
        states = [one for _, one in results]
        assert all(one == states[0] for one in states)
        state.update(states[0])
    left = count - sum(steps * batch_size * size for size in sizes[:-1])
    beyond = -left % sizes[-1] if uneven == "pad" else -(left % sizes[-1])
    assert len(taken) == count + beyond
    assert len(set(taken)) == min(count, count + beyond)
