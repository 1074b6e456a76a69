"""Programs with Keras whose ranks change, as changing.py runs them, on the backend of KERAS_BACKEND."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import keras
import numpy as np
import pytest

import sirtaki.keras as hvd
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import HorovodInternalError, HostsUpdatedInterrupt, UnsupportedError
from sirtaki.keras.callbacks import sync_variables

STEPS, ROWS = 3, 4  # in each world; per rank


def make_model() -> Any:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh", dtype="float64"),
            keras.layers.Dense(1, dtype="float64"),
        ]
    )
    numbers = np.random.default_rng(0)
    model.set_weights([numbers.normal(size=one.shape) for one in model.get_weights()])
    return model


def batch(step: int, rank: int) -> tuple[Any, Any]:
    numbers = np.random.default_rng((step, rank))
    x = numbers.normal(size=(ROWS, 3))
    return x, np.sin(x.sum(axis=1, keepdims=True)) * 3


def own_batches(step: int) -> tuple[Any, Any]:
    """Returns this rank's batches of a world whose first step this is."""
    parts = [batch(step + index, hvd.rank()) for index in range(STEPS)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def whole_batch(step: int, size: int) -> tuple[Any, Any]:
    parts = [batch(step, rank) for rank in range(size)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def assert_close(found: Any, expected: Any) -> None:
    """Compares weights. Keras computes losses in float32 for every layer dtype."""
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Fit:
    """`model.fit`, compiled once: its steps equal one process' steps with the batches of all ranks."""

    eagerly = False
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **self.options)
        self.model.compile(optimizer, "mse", run_eagerly=self.eagerly)
        self.state = hvd.elastic.KerasState(self.model, step=0)
        self.callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        x, y = own_batches(self.state.step)
        fitted = self.model.fit(
            x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=self.callbacks, validation_data=(x, y)
        )
        losses = hvd.allgather(np.array([fitted.history["val_loss"][0]]))
        assert (losses == losses[0]).all()
        self.state.step += STEPS
        self.state.commit()
        expected = self.trained_alone(sizes)
        assert_close(self.model, expected)
        assert int(self.model.optimizer.iterations) == STEPS * len(sizes)
        self.model.fit(x, y, batch_size=ROWS, verbose=0)  # is not committed
        self.state.restore()
        assert_close(self.model, expected)
        assert int(self.model.optimizer.iterations) == STEPS * len(sizes)

    def trained_alone(self, sizes: Sequence[int]) -> Any:
        model = make_model()
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=self.eagerly)
        for step in range(STEPS * len(sizes)):
            model.train_on_batch(*whole_batch(step, sizes[step // STEPS]))
        return model


class EagerFit(Fit):
    eagerly = True


class GroupedFit(Fit):
    options: ClassVar[dict[str, Any]] = {"groups": 3, "compression": hvd.Compression.none}


class Sharded:
    """Divided state in `model.fit`: weights and the whole state have the bits of undivided state."""

    eagerly = False

    def __init__(self) -> None:
        self.models = [self.compiled(shard) for shard in (None, "state")]
        self.states = [hvd.elastic.KerasState(model, step=0) for model in self.models]
        self.outside = self.compiled("state")
        self.state = self

    def compiled(self, shard: str | None) -> Any:
        model, optimizer = make_model(), keras.optimizers.Adam(0.01, global_clipnorm=0.5)
        model.compile(hvd.DistributedOptimizer(optimizer, shard=shard), "mse", run_eagerly=self.eagerly)
        return model

    def receive(self, start: Any) -> None:
        for state in self.states:
            state.receive(start)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        self.check(STEPS * (len(sizes) - 1))
        if hvd.size() > 1:
            with pytest.raises(UnsupportedError, match="has the state of rank"):
                self.outside.optimizer.apply([], [])
        self.fit()
        for state in self.states:
            state.step += STEPS
            state.commit()
        self.check(STEPS * len(sizes))
        self.fit()  # is not committed
        for state in self.states:
            state.restore()
        self.check(STEPS * len(sizes))

    def fit(self) -> None:
        x, y = own_batches(self.states[0].step)
        for model in self.models:
            model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)

    def check(self, steps: int) -> None:
        whole, divided = self.models
        assert int(divided.optimizer.iterations) == steps
        states = [hvd.full_state_dict(model.optimizer) for model in self.models]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            np.testing.assert_array_equal(states[1][key], value)
        for one, other in zip(divided.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        moments = [len(model.optimizer.variables) - 2 for model in self.models]
        assert sum(hvd.allgather_object(moments[1])) == moments[0]


class ShardedEager(Sharded):
    eagerly = True


class ShardedAgreed(Sharded):
    """Before a change that the ranks agree on, each stores the whole state: any of them may leave."""

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        super().in_world(number, sizes)
        for state in self.states:
            state.prepare_change()


class ShardedLost(Sharded):
    """Ranks are lost together with the ranks that had the copies of their state."""

    def receive(self, start: Any) -> None:
        divided = self.states[1]
        if hvd.size() == 4:
            divided.receive(start)
            divided.commit()
            with pytest.raises(ValueError, match=r"write hvd\.full_state_dict\(optimizer\) to files"):
                divided.keep_checkpoints("folder")
        else:
            with pytest.raises(HorovodInternalError, match=r"the slices of rank 1 of 4 were on ranks that"):
                divided.receive(start)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        pass


class ShardedFunction:
    """A function of TensorFlow keeps the state that it was traced with: another rank or size is refused."""

    def __init__(self) -> None:
        import tensorflow as tf

        self.model = make_model()
        self.model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard="state"), "mse")
        self.state, self.error = hvd.elastic.KerasState(self.model), tf.errors.InvalidArgumentError
        ones = [tf.ones_like(variable.value) for variable in self.model.trainable_variables]
        self.step = tf.function(
            lambda: self.model.optimizer.apply(ones, self.model.trainable_variables), autograph=False
        )
        self.step()  # traced for the only rank

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        with pytest.raises(self.error, match="the ranks have changed") if sizes[-1] > 1 else nullcontext():
            self.step()
        self.state.commit()


class LocalSteps:
    """DiLoCo in `model.fit`: each rank keeps its optimizer's state; the outer optimizer's is that of all."""

    def __init__(self) -> None:
        self.model = make_model()
        self.model.compile(self.inner(), "mse")
        self.averages = hvd.callbacks.LocalSGDCallback(STEPS, self.outer())
        self.state = hvd.elastic.KerasState(self.model, local_steps=self.averages, step=0)
        self.commits = hvd.elastic.CommitStateCallback(self.state, 2)  # due within a window

    @staticmethod
    def inner() -> Any:
        return keras.optimizers.SGD(0.05, momentum=0.9)

    @staticmethod
    def outer() -> Any:
        return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        x, y = own_batches(self.state.step)
        self.state.step += STEPS
        self.fit(x, y, [self.averages, self.commits])
        assert self.state.is_synchronized
        expected = self.trained_alone(sizes)
        assert_close(self.model, expected)
        with pytest.raises(InterruptedError):  # what it has trained is not committed
            self.fit(np.tile(x, (2, 1)), np.tile(y, (2, 1)), [self.averages, Ends(STEPS + 1)])
        for commit in (self.state.commit, self.state.check_host_updates):
            with pytest.raises(ValueError, match="since the last average"):
                commit()
        self.state.restore()
        assert_close(self.model, expected)
        self.state.check_host_updates()

    def fit(self, x: Any, y: Any, callbacks: list[Any]) -> None:
        self.model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=callbacks)

    def trained_alone(self, sizes: Sequence[int]) -> Any:
        """Returns the model after all worlds, in each of which a rank that joins has rank 0's optimizer."""
        whole, outer = make_model(), self.outer()
        outer.build(whole.trainable_variables)
        ranks: list[list[Any]] = []
        for world, size in enumerate(sizes):
            before, ranks, trained = ranks, [], []
            for rank in range(size):
                model, inner = make_model(), self.inner()
                model.set_weights(whole.get_weights())
                model.compile(inner, "mse")
                inner.build(model.trainable_variables)
                own = before[rank if rank < len(before) else 0] if before else inner.variables
                for variable, value in zip(inner.variables, own, strict=True):
                    variable.assign(value)
                for step in range(STEPS * world, STEPS * (world + 1)):
                    model.train_on_batch(*batch(step, rank))
                sync_variables(model)
                ranks.append([np.array(keras.ops.convert_to_numpy(one.value)) for one in inner.variables])
                trained.append(model.get_weights())
            means = [np.mean(parts, axis=0) for parts in zip(*trained, strict=True)]
            gradients = [one - mean for one, mean in zip(whole.get_weights(), means, strict=True)]
            outer.apply([keras.ops.convert_to_tensor(one) for one in gradients], whole.trainable_variables)
        return whole


class Ends(keras.callbacks.Callback):
    """Interrupts a training after some batches, as the loss of a rank does."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == self.batches:
            raise InterruptedError


class LocalLayer:
    """The gradients of a layer that stays on each rank are divided by the present number of ranks."""

    state = None

    def __init__(self) -> None:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        self.model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[layer])
        self.model.compile(optimizer, "mse")

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        self.model.set_weights([np.zeros((1, 1))])
        self.model.train_on_batch(np.ones((2, 1)), np.full((2, 1), 3.0))
        np.testing.assert_allclose(self.model.get_weights()[0], [[6.0 / hvd.size()]], rtol=1e-6)


class SeveralOptimizers:
    """An optimizer that is made in a world does not get the name of one that was made before."""

    state = None

    def __init__(self) -> None:
        self.first, self.second = self._distributed(), self._distributed()

    def _distributed(self) -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        third = self._distributed()
        names = [one._exchange.prefix for one in (self.first, self.second, third)]
        assert len(set(names)) == 3
        assert names[2] not in ("gradient", "gradient.1")
        everywhere = hvd.allgather_object(names)
        assert all(one[:2] == names[:2] for one in everywhere)


class WarmUp:
    """The learning rate goes by the present number of ranks."""

    state = None

    def __init__(self) -> None:
        self.model = make_model()
        self.model.compile(keras.optimizers.SGD(1.0), "mse")
        self.callback = hvd.callbacks.LearningRateWarmupCallback(8.0, warmup_epochs=2, steps_per_epoch=4)
        self.callback.set_model(self.model)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        self.callback.on_epoch_begin(0)
        self.callback.on_train_batch_begin(1)
        size = hvd.size()
        wanted = 8.0 / size * (1.0 + 0.5 * (size - 1) / 2)
        assert float(self.model.optimizer.learning_rate) == pytest.approx(wanted, rel=1e-6)


class AccountedFit:
    """`model.fit` on samples whose account the state has, from the epoch and the batch of the state on."""

    model: Any
    data: Any
    state: Any

    def fit(self, epochs: int, *callbacks: Any) -> None:
        state, elastic = self.state, hvd.elastic
        updates = [elastic.UpdateEpochStateCallback(state), elastic.UpdateBatchStateCallback(state)]
        self.model.fit(
            self.data,
            initial_epoch=state.epoch,
            epochs=epochs,
            callbacks=[*updates, *callbacks],
            verbose=0,
        )


class Interrupted(AccountedFit):
    """An epoch in which the ranks change: its samples are each trained once, over all worlds."""

    SAMPLES, BATCH = 40, 2

    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        self.model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3)), "mse")
        self.data = hvd.shard_arrays(
            np.arange(float(self.SAMPLES))[:, None], np.zeros((self.SAMPLES, 1)), batch_size=self.BATCH
        )
        self.state = hvd.elastic.KerasState(self.model, epoch=0, batch=0, data=self.data, seen=[], order=[])

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        state, steps = self.state, 3
        if len(sizes) > 1:
            assert state.data._deal.done == sum(3 * self.BATCH * size for size in sizes[:-1])
        recorder, commits = Recorder(state, steps), hvd.elastic.CommitStateCallback(state)
        is_last = number == 3
        if is_last:
            recorder.stop_after = 10**6
            self.fit(2, recorder, commits)
        else:
            with pytest.raises(HostsUpdatedInterrupt):
                self.fit(2, recorder, commits)
            assert state.epoch == 0
            return
        assert (state.epoch, state.batch) == (2, 0)
        first, second = state.seen
        assert set(first) == set(second) == set(range(self.SAMPLES))
        padding = -(self.SAMPLES - 2 * 3 * (1 + 2 + 1)) % sizes[-1]
        assert len(first) == self.SAMPLES + padding
        assert first[: self.SAMPLES] != second[: self.SAMPLES]


class Recorder(keras.callbacks.Callback):
    """Records the samples of all ranks; raises in the commit after a number of batches."""

    def __init__(self, state: Any, stop_after: int) -> None:
        super().__init__()
        self.recorded, self.stop_after, self.done = state, stop_after, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if len(self.recorded.seen) <= epoch:
            self.recorded.seen.append([])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        data = self.recorded.data
        if batch < data.skipped:
            return
        mine = data._deal.units(batch).tolist()
        self.recorded.seen[-1] += [one for part in hvd.allgather_object(mine) for one in part]
        self.done += 1
        if self.done == self.stop_after:
            self.recorded._commits = Leaving()


class Leaving:
    """Commits of a job whose ranks are about to change."""

    def check_operations(self) -> None:
        pass

    def count_commit(self) -> None:
        pass

    def check(self, state: Any) -> None:
        state._commits = None
        raise HostsUpdatedInterrupt


class SkippedBatches:
    """Data without an account: batches that have been done are read again, and nothing is computed."""

    def __init__(self) -> None:
        self.model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        self.model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
        self.state = hvd.elastic.KerasState(self.model, epoch=0, batch=0)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        x, targets = np.ones((12, 1)), np.arange(12.0)[:, None]
        self.model.set_weights([np.zeros((1, 1))])
        self.state.batch, self.state.epoch = 9, 4
        self.state.world_of_batch = hvd.size()
        commits = self.state.commit
        counted: list[int] = []
        self.state.commit = lambda: (counted.append(self.state.batch), commits())  # type: ignore
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(self.state),
            hvd.elastic.UpdateBatchStateCallback(self.state),
            hvd.elastic.CommitStateCallback(self.state, 2),
        ]
        self.model.fit(x, targets, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
        np.testing.assert_allclose(self.model.get_weights()[0], [[11.0]])  # the target of the last batch
        assert int(self.model.optimizer.iterations) == 3 * (number + 1) + 12 * number
        assert counted == [11, 0]  # two batches after the start, and at the end of the epoch
        assert (self.state.epoch, self.state.batch) == (5, 0)
        self.model.fit(x, targets, batch_size=1, shuffle=False, verbose=0)  # skips nothing
        assert int(self.model.optimizer.iterations) == 15 * (number + 1)
        self.state.commit = commits
        self.state.commit()


class LostRank(AccountedFit):
    """A rank dies in the middle of an epoch: the others go on from the last batch, with the samples left."""

    SAMPLES, BATCH, RATE = 34, 2, 2.0**-12

    def __init__(self) -> None:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.model = keras.Sequential([keras.Input((1,)), layer])
        self.model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(self.RATE, momentum=0.5)), "mse")
        self.x = np.arange(float(self.SAMPLES))[:, None]
        self.data = hvd.shard_arrays(self.x, np.zeros_like(self.x), batch_size=self.BATCH)
        self.state = hvd.elastic.KerasState(self.model, epoch=0, batch=0, data=self.data)

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        state = self.state
        commits = hvd.elastic.CommitStateCallback(state)
        if number == 0:
            with pytest.raises(Exception) as raised:  # noqa: PT011  # each framework has its own
                self.fit(2, commits, Dying(3))
            failure = current().failure
            assert failure is not None, raised.value
            assert failure.culprit == 0
            state.restore()
            assert (state.epoch, state.batch, int(self.model.optimizer.iterations)) == (0, 3, 3)
            np.testing.assert_allclose(self.model.get_weights()[0], self.replayed(3), rtol=1e-6)
            return
        assert state.batch == 3
        self.fit(1, commits)
        assert (state.epoch, int(self.model.optimizer.iterations)) == (1, 3 + 4)
        np.testing.assert_allclose(self.model.get_weights()[0], self.replayed(7), rtol=1e-6)

    def replayed(self, steps: int) -> Any:
        """Returns the weight after three steps of three ranks and the others of two: no sample twice."""
        order, weight, momentum = np.arange(self.SAMPLES), 1.0, 0.0
        np.random.default_rng((0, 1)).shuffle(order)
        for step in range(steps):
            count = self.BATCH * (3 if step < 3 else 2)
            x, order = self.x[order[:count], 0], order[count:]
            momentum = 0.5 * momentum - self.RATE * (2.0 * x * x * weight).mean()
            weight += momentum
        return [[weight]]


class Dying(keras.callbacks.Callback):
    """Ends the process of rank 0 before a batch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch and hvd.rank() == 0:
            os._exit(0)


class OrderOfBatches:
    """Keras would shuffle the batches of a dataset; an account of what has been done needs their order."""

    state = None

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        data = hvd.shard_arrays(np.zeros((400, 1)), np.zeros((400, 1)), batch_size=4)
        data.count()
        assert [len(data[index][0]) for index in (0, 1, 0, 2, 1)] == [4] * 5  # by two iterators
        with pytest.raises(ValueError, match="shuffle=False"):
            data[9]


class ConvertedBatches:
    """The number of batches is converted to another number of ranks."""

    state = None

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        state = hvd.elastic.KerasState(model, epoch=0, batch=5)
        state.world_of_batch = 2
        callback = hvd.elastic.UpdateBatchStateCallback(state)
        callback.set_model(model)
        model.make_train_function()
        callback.on_train_begin()
        assert state.batch == {1: 10, 2: 5, 3: 4}[hvd.size()]
        assert state.world_of_batch == hvd.size()


class Refusals:
    """Mistakes."""

    state = None

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        unbuilt = keras.Sequential([keras.layers.Dense(1)])
        with pytest.raises(ValueError, match=r"model\.build"):
            hvd.elastic.KerasState(unbuilt)
        with pytest.raises(ValueError, match="leave out process_set"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=hvd.ProcessSet([0]))
        with pytest.raises(ValueError, match="1 at least"):
            hvd.elastic.CommitStateCallback(None, 0)
        assert current().survivors is not None
