"""The callbacks of sirtaki.keras, in `model.fit`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import sirtaki.keras as hvd
from cases import case
from cases.keras_models import assert_alike, make_model, values_of


def samples(count: int, seed: int = 0) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(count, 3)), generator.integers(0, 2, size=(count, 1))


class Recorder(keras.callbacks.Callback):
    """A callback that records the weights and the learning rate before each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Any] = []
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.weights.append(values_of(self.model.weights))
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


@case()
def the_same_start() -> None:
    """Ranks are equal before the first batch; the random numbers of dropout stay different."""
    inputs = keras.Input((3,))
    hidden = keras.layers.Dropout(0.5, seed=hvd.rank())(keras.layers.Dense(4)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.BatchNormalization()(hidden)))
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (1 + hvd.rank()))), "mse", run_eagerly=True
    )
    model.set_weights([np.full(one.shape, hvd.rank() + 1.0) for one in model.get_weights()])
    root, recorder = hvd.size() - 1, Recorder()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root), recorder]
    model.fit(*samples(4, hvd.rank()), batch_size=2, verbose=0, callbacks=callbacks)
    for found in recorder.weights[0]:
        np.testing.assert_array_equal(found, np.full_like(found, root + 1))
    np.testing.assert_allclose(recorder.rates, 0.01 * (1 + root), rtol=1e-6)
    assert_alike([*model.trainable_weights, *model.optimizer.variables])
    seeds = [values_of([one])[0] for one in model.variables if "seed" in one.path]
    assert seeds
    everyone = hvd.allgather(np.concatenate(seeds).reshape(1, -1))
    assert len({tuple(row) for row in everyone.tolist()}) == hvd.size()


@case()
def a_model_that_is_built_late() -> None:
    """A model may be built late, on some ranks only: the broadcast then follows the first batch."""
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    if hvd.rank() == 0:
        model.build((None, 3))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse", run_eagerly=True)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*samples(4, hvd.rank()), batch_size=2, verbose=0, callbacks=[callback])
    assert_alike([*model.weights, *model.optimizer.variables])


def judged() -> Any:
    """Returns a model with metrics of several kinds."""
    model = make_model()
    model.layers[-1].activation = keras.activations.sigmoid
    metrics = [
        "accuracy",
        keras.metrics.AUC(num_thresholds=20),
        keras.metrics.RootMeanSquaredError(name="rmse"),
    ]
    return model, metrics


@case(validates=[True, False])
def metrics_over_uneven_data(validates: bool) -> None:
    """Metrics equal those of one process: rank r has 3 + 2r samples, and 2 + r for validation."""
    shares = [samples(3 + 2 * rank, rank) for rank in range(hvd.size())]
    others = [samples(2 + rank, 50 + rank) for rank in range(hvd.size())]
    whole, other = ([np.concatenate(part) for part in zip(*parts, strict=True)] for parts in (shares, others))
    model, metrics = judged()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", metrics=metrics, run_eagerly=True
    )
    history = model.fit(
        *shares[hvd.rank()],
        batch_size=100,
        epochs=2,
        verbose=0,
        validation_data=others[hvd.rank()] if validates else None,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    ).history
    expected = model.evaluate(*whole, batch_size=1000, return_dict=True, verbose=0)
    if validates:
        validation = model.evaluate(*other, batch_size=1000, return_dict=True, verbose=0)
        expected |= {f"val_{name}": value for name, value in validation.items()}
    assert set(history) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(history[name], [value] * 2, rtol=1e-5, err_msg=name)


@case()
def metrics_after_an_evaluation() -> None:
    shares = [samples(3 + 2 * rank, rank) for rank in range(hvd.size())]
    whole = [np.concatenate(part) for part in zip(*shares, strict=True)]
    model, metrics = judged()
    model.compile("sgd", "mse", metrics=metrics, run_eagerly=True)
    own = model.evaluate(*shares[hvd.rank()], batch_size=2, return_dict=True, verbose=0)
    found = hvd.reduce_metrics(model)
    assert {name: float(value) for name, value in model.get_metrics_result().items()} == own
    for name, value in model.evaluate(*whole, batch_size=1000, return_dict=True, verbose=0).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def mean_distance(expected: Any, predicted: Any) -> Any:
    """A function as a metric, which needs both of one dtype on TensorFlow."""
    return keras.ops.mean(keras.ops.abs(expected - predicted), -1)


METRICS: dict[str, tuple[str, Any]] = {  # metrics whose results are not just sums over samples, by targets
    **{
        name: ("binary", getattr(keras.metrics, name))
        for name in ("AUC", "Precision", "Recall", "RootMeanSquaredError")
    },
    **{
        name: ("binary", lambda name=name: getattr(keras.metrics, name)(0.5))
        for name in ("SensitivityAtSpecificity", "PrecisionAtRecall")
    },
    "BinaryIoU": ("binary", lambda: keras.metrics.BinaryIoU([0, 1])),
    "F1Score with a threshold": ("binary", lambda: keras.metrics.F1Score(threshold=0.5)),
    "F1Score": ("one hot", keras.metrics.F1Score),
    "F1Score, weighted": ("one hot", lambda: keras.metrics.F1Score("weighted")),
    "FBetaScore": ("one hot", lambda: keras.metrics.FBetaScore("macro", beta=2.0)),
    "R2Score": ("one hot", lambda: keras.metrics.R2Score(None)),
    "OneHotMeanIoU": ("one hot", lambda: keras.metrics.OneHotMeanIoU(3)),
    "AUC of each label": ("one hot", lambda: keras.metrics.AUC(multi_label=True, num_labels=3)),
    "TopKCategoricalAccuracy": ("one hot", lambda: keras.metrics.TopKCategoricalAccuracy(2)),
    "CosineSimilarity": ("one hot", keras.metrics.CosineSimilarity),
    "KLDivergence": ("one hot", keras.metrics.KLDivergence),
    "SparseTopKCategoricalAccuracy": ("classes", lambda: keras.metrics.SparseTopKCategoricalAccuracy(2)),
    "a function": ("one hot", lambda: mean_distance),
}


@case(targets=["binary", "one hot", "classes"])
def metrics_of_all_kinds(targets: str) -> None:
    """Each equals that of one process, in training and in validation, also if it is an array."""
    generator = np.random.default_rng(0)
    x, classes = generator.normal(size=(20, 3)), generator.integers(0, 3, size=(20, 1))
    y = {"binary": (classes > 1) * 1.0, "one hot": np.eye(3)[classes[:, 0]], "classes": classes}[targets]
    made = {name: make() for name, (kind, make) in METRICS.items() if kind == targets}
    model = (
        make_model(dtype="float32")
        if targets == "binary"
        else keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    )
    loss = {"binary": "mse", "one hot": "categorical_crossentropy"}.get(
        targets, "sparse_categorical_crossentropy"
    )
    hvd.broadcast_model(model)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss, metrics=list(made.values()))
    history = model.fit(
        hvd.shard_arrays(x, y, batch_size=5),
        validation_data=hvd.shard_arrays(x, y, batch_size=5, uneven="keep"),
        verbose=0,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    ).history
    expected = model.evaluate(x, y, batch_size=20, return_dict=True, verbose=0)
    assert len(expected) == 1 + len(made)
    for name, value in expected.items():
        for found in (history[name][0], history[f"val_{name}"][0]):
            # R2Score is 1 minus a ratio: near 0 only the rounding of that 1 in float32 is left.
            np.testing.assert_allclose(found, value, rtol=1e-5, atol=5e-7, err_msg=name)


class Extra(keras.callbacks.Callback):
    """A callback that adds logs of its own, some on one rank only."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["rank"] = float(hvd.rank())
        logs["same"] = 0.1
        if hvd.rank() == 0:
            logs["first"] = 7.0


@case()
def logs_that_are_no_metrics() -> None:
    """Other logs are averaged by value: a rank's weight is its number of samples."""
    counts = [2 + 2 * rank for rank in range(hvd.size())]
    model = make_model()
    model.compile("sgd", "mse", run_eagerly=True)
    history = model.fit(
        *samples(counts[hvd.rank()]),
        verbose=0,
        callbacks=[Extra(), hvd.callbacks.MetricAverageCallback()],
    ).history
    mean = sum(rank * count for rank, count in enumerate(counts)) / sum(counts)
    np.testing.assert_allclose(history["rank"], mean)
    assert history["same"] == [0.1]
    if hvd.rank() == 0:
        assert history["first"] == [7.0]


def rates(callback: Any, epochs: int, batches: int = 2) -> Recorder:
    model, recorder = make_model(), Recorder()
    model.compile(keras.optimizers.SGD(1.0, momentum=0.5), "mse", run_eagerly=True)
    x, y = samples(2 * batches)
    history = model.fit(x, y, batch_size=2, epochs=epochs, verbose=0, callbacks=[callback, recorder]).history
    assert len(history["learning_rate"]) == epochs
    return recorder


@case()
def a_warm_up() -> None:
    size = hvd.size()
    found = rates(hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2, verbose=1), epochs=3).rates
    expected = [0.5 * (1 + passed * (size - 1) / 2) / size for passed in (0.5, 1, 1.5, 2)] + [0.5, 0.5]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@case()
def schedules() -> None:
    schedule = hvd.callbacks.LearningRateScheduleCallback
    found = rates(schedule(0.5, 0.1, start_epoch=1, end_epoch=3), epochs=4).rates
    np.testing.assert_allclose(found, [1, 1, 0.5, 0.5, 0.05, 0.05, 0.05, 0.05], rtol=1e-6)
    found = rates(schedule(0.5, lambda epoch: 1 + epoch, staircase=False), epochs=2).rates
    np.testing.assert_allclose(found, [0.5, 0.75, 1, 1.25], rtol=1e-6)


@case(eagerly=[True, False])
def a_learning_rate_that_ends(eagerly: bool) -> None:
    """The step uses the value that the callback has set, also in the middle of an epoch."""
    model, recorder = make_model(dtype="float32"), Recorder()
    model.compile(keras.optimizers.SGD(1.0, momentum=0.5), "mse", run_eagerly=eagerly)
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 1.0 if epoch == 0 else 0.0, staircase=False, steps_per_epoch=3
    )
    model.fit(*samples(6), batch_size=2, verbose=0, callbacks=[schedule, recorder])
    for start, second, last in zip(*recorder.weights[:2], values_of(model.weights), strict=True):
        assert (start != second).any()
        np.testing.assert_array_equal(second, last)


@case(corrects=[True, False])
def momentum_when_the_learning_rate_changes(corrects: bool) -> None:
    """Momentum is in steps of the old rate: with a tenth of the rate, a tenth of the momentum remains."""
    model = make_model()
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_weights)
    for momentum in optimizer.momentums:
        momentum.assign(np.ones(momentum.shape))
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0, momentum_correction=corrects)
    callback.set_model(model)
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    for momentum in values_of(optimizer.momentums):
        np.testing.assert_allclose(momentum, 0.1 if corrects else 1.0, rtol=1e-6)


@case()
def one_rank_saves_the_best() -> None:
    """All ranks know the best value, and find the file complete."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    path = Path(folder) / "best.keras"
    model = make_model(dtype="float32")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", run_eagerly=True)
    checkpoint = hvd.callbacks.BestModelCheckpoint(path, monitor="loss")
    seen: list[bool] = []
    found = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(path.exists()))
    average = hvd.callbacks.MetricAverageCallback()
    history = model.fit(
        *samples(4, hvd.rank()), epochs=2, verbose=hvd.verbose(0), callbacks=[average, checkpoint, found]
    ).history
    assert seen == [True, True]
    assert checkpoint.best == min(history["loss"])
    assert hvd.verbose(1) == (1 if hvd.rank() == 0 else 0)
    hvd.barrier()
    if hvd.rank() == 0:
        keras.models.load_model(path)
        path.unlink()
        path.parent.rmdir()


@case()
def the_steps_of_a_training_are_counted() -> None:
    """Steps that Keras compiles are counted between batches, by the callback; others by themselves."""
    epochs, batches = 2, 3
    for is_eager in (True, False):
        before = hvd.stats()["steps"]["count"]
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
        model.compile(optimizer, "mse", run_eagerly=is_eager)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        data = samples(2 * batches, hvd.rank())
        model.fit(*data, batch_size=2, epochs=epochs, verbose=0, callbacks=callbacks)
        assert hvd.stats()["steps"]["count"] - before == epochs * batches


@case()
def accumulated_batches_count_as_one_step() -> None:
    for is_eager in (True, False):
        before = hvd.stats()["steps"]["count"]
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=2)
        model.compile(optimizer, "mse", run_eagerly=is_eager)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(*samples(8, hvd.rank()), batch_size=2, verbose=0, callbacks=callbacks)
        assert hvd.stats()["steps"]["count"] - before == 2


class Stop(keras.callbacks.Callback):
    """Ends the training on some ranks, after the third batch or after the first epoch; counts batches."""

    def __init__(self, ranks: Any = (), when: str = "") -> None:
        super().__init__()
        self.is_due, self.when, self.count = hvd.rank() in ranks, when, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        if self.is_due and self.when == "batch" and batch == 2:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.is_due and self.when == "epoch":
            self.model.stop_training = True


def fit(*callbacks: Any, has_bad_batch: bool = False, validates: bool = False, eagerly: bool = True) -> None:
    """Trains two epochs of five batches; the loss of the third batch of rank 1 may be no number."""
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", run_eagerly=eagerly)
    x, y = samples(10, hvd.rank())
    targets = y.astype(np.float64)
    if has_bad_batch and hvd.rank() == 1:
        targets[4] = np.nan
    both = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    model.fit(
        x,
        targets,
        batch_size=2,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[*both, *callbacks],
        validation_data=(x, y) if validates else None,
    )


@case(what=["batch", "batch and validation", "epoch", "no number"], least=2)
def a_rank_that_stops_alone(what: str) -> None:
    """The other ranks would wait for it: refused there and here, before anything waits."""
    stop_alone(what, eagerly=True)


@case(what=["batch", "epoch"], least=2)
def a_rank_that_stops_alone_after_compiled_steps(what: str) -> None:
    """Also if the program trains while it treats an exception."""
    try:
        raise KeyError("of the program")
    except KeyError:
        stop_alone(what, eagerly=False)


def stop_alone(what: str, eagerly: bool) -> None:
    """Trains until rank 1 ends its training, and checks the errors."""
    callback = Stop([1], what.split()[0])
    if what == "no number":
        callback = keras.callbacks.TerminateOnNaN()
    text = (
        r"rank 1 \(pid.* alone has ended its training, after \d+ steps"
        if hvd.rank() == 1
        else "uint8 of shape"
    )
    with pytest.raises(Exception, match=text):
        fit(callback, has_bad_batch=what == "no number", validates="validation" in what, eagerly=eagerly)


@case(when=["batch", "epoch"])
def ranks_that_stop_together(when: str) -> None:
    for validates in (False, True):
        callback = Stop(range(hvd.size()), when)
        fit(callback, validates=validates)
        assert callback.count == (3 if when == "batch" else 5)


@case(least=2)
def a_loss_that_is_no_number_on_one_rank() -> None:
    """All ranks end after the same batch."""
    counter = Stop()
    fit(counter, hvd.callbacks.TerminateOnNaN(), has_bad_batch=True)
    assert counter.count == 3
