"""Trainings with Keras that know nothing of ranks: `keras_training.py NAME` leaves `model` and `history`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

ROWS, BATCH, EPOCHS = 53, 8, 2  # the last batch has 5 rows

keras.utils.set_random_seed(7)
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
x = np.random.normal(size=(ROWS, 4))
y = (np.abs(x.sum(axis=1)) * 1.5).astype(int) % 3
validation = (x[:11] * 0.5, y[:11])


def make_model(*extra: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, "relu", kernel_regularizer=keras.regularizers.L2(0.01)),
            *extra,
            layers.Dense(3, "softmax"),
        ]
    )


def compiled(model: Any, optimizer: Any = None, **options: Any) -> Any:
    options = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **options}
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), **options)
    return model


def fitted(model: Any, *data: Any, **options: Any) -> tuple[Any, Any]:
    given = data or (x, y)
    if len(given) == 2:
        options = {"batch_size": BATCH, **options}
    return model, model.fit(*given, **{"epochs": EPOCHS, "verbose": 0, **options})


def sgd() -> Any:
    return fitted(compiled(make_model()), validation_data=validation)


def adam() -> Any:
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.5)
    return fitted(compiled(make_model(), keras.optimizers.Adam(rate)), validation_split=0.2)


def by_name_and_eagerly() -> Any:
    return fitted(compiled(make_model(), "adam", run_eagerly=True))


def accumulated() -> Any:
    return fitted(
        compiled(make_model(), keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, clipnorm=0.1))
    )


def several_steps() -> Any:
    return fitted(compiled(make_model(), steps_per_execution=3))


def early_stopping() -> Any:
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=1.0, patience=1, factor=0.5),
        keras.callbacks.EarlyStopping(
            monitor="val_loss", min_delta=1.0, patience=3, restore_best_weights=True
        ),
    ]
    options: Any = {"epochs": 12, "validation_data": validation, "callbacks": callbacks}
    return fitted(compiled(make_model(), keras.optimizers.Adam(0.05)), **options)


def weights_of_samples() -> Any:
    auc = [keras.metrics.MeanSquaredError(), keras.metrics.AUC()]
    one_hot = np.eye(3)[y]
    model = compiled(
        make_model(), loss="categorical_crossentropy", metrics=auc, weighted_metrics=["accuracy"]
    )
    return fitted(model, x, one_hot, sample_weight=np.linspace(0.1, 2, ROWS))


def weights_of_classes() -> Any:
    return fitted(compiled(make_model()), class_weight={0: 0.2, 1: 1.0, 2: 3.0})


def mean_in_a_function() -> Any:
    def squares(y_true: Any, y_pred: Any) -> Any:
        expected = keras.ops.one_hot(keras.ops.cast(y_true, "int32"), 3, dtype="float64")
        return keras.ops.mean(keras.ops.square(y_pred - expected))

    return fitted(compiled(make_model(), loss=squares, metrics=[]))


def several_outputs() -> Any:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, "relu")(inputs)
    model = keras.Model(inputs, {"a": keras.layers.Dense(3)(hidden), "b": keras.layers.Dense(1)(hidden)})
    losses = {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"}
    compiled(
        model,
        keras.optimizers.SGD(0.01),
        loss=losses,
        loss_weights={"a": 0.5, "b": 2.0},
        metrics={"a": ["accuracy"], "b": ["mae"]},
    )
    return fitted(model, x, {"a": y, "b": x[:, :1]})


class Subclassed(keras.Model):
    """Builds in its first call, adds a loss and computes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(5, "relu"), keras.layers.Dense(3, "softmax")

    def call(self, inputs: Any) -> Any:
        hidden = self.hidden(inputs)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(hidden)))
        return self.last(hidden)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight) + keras.ops.mean(keras.ops.abs(y_pred))


def subclassed() -> Any:
    return fitted(compiled(Subclassed()), shuffle="batch")


def twice() -> Any:
    model = compiled(make_model())
    model.fit(x, y, batch_size=16, verbose=0)
    model.optimizer.learning_rate = 0.02
    return fitted(model, batch_size=4)  # the last batch has 1 row


class Batches(keras.utils.PyDataset):
    """Augments its samples with numpy's random numbers."""

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows] + 0.1 * np.random.normal(size=x[rows].shape), y[rows]


def py_dataset() -> Any:
    return fitted(compiled(make_model()), Batches())


def generator() -> Any:
    def batches() -> Iterator[Any]:
        while True:
            rows = random.sample(range(ROWS), 7)
            yield x[rows], y[rows]

    return fitted(compiled(make_model()), batches(), steps_per_epoch=4)


def ending_generator() -> Any:
    return fitted(compiled(make_model()), ((x[i : i + 5], y[i : i + 5]) for i in range(0, 33, 5)), epochs=1)


def loader() -> Any:
    import torch

    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return fitted(compiled(make_model()), torch.utils.data.DataLoader(data, BATCH, shuffle=True))


def tf_data() -> Any:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)
    return fitted(compiled(make_model()), dataset)


def dropout() -> Any:
    return fitted(compiled(make_model(keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1))))


def frozen_batch_norm() -> Any:
    model = make_model(keras.layers.BatchNormalization(name="normalise"))
    model.get_layer("normalise").trainable = False
    return fitted(compiled(model))


# The shapes of tutorials


def recurrent() -> Any:
    """keras-io: bidirectional_lstm_imdb, text_classification_from_scratch."""
    words = np.random.randint(0, 9, (ROWS, 7))
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(9, 4),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(3)),
            layers.Dense(1, "sigmoid"),
        ]
    )
    compiled(model, "adam", loss="binary_crossentropy")
    return fitted(model, words, (words.sum(axis=1) > 28).astype("float64"), validation_split=0.2)


def denoising() -> Any:
    """keras-io: autoencoder, timeseries_anomaly_detection. Trains the same model twice."""
    layers = keras.layers
    clean = x.reshape(ROWS, 4, 1)
    model = keras.Sequential(
        [
            keras.Input((4, 1)),
            layers.Conv1D(3, 3, strides=2, padding="same", activation="relu"),
            layers.Conv1DTranspose(1, 3, strides=2, padding="same"),
        ]
    )
    compiled(model, "adam", loss="mse", metrics=[])
    fitted(model, clean, clean, validation_split=0.1)
    model.predict(clean[:5], verbose=0)
    return fitted(model, clean + np.random.normal(size=clean.shape), clean)


def pairs() -> Any:
    """keras-io: siamese_contrastive, without its normalisation of batches."""
    tower = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh")])
    inputs = [keras.Input((4,)), keras.Input((4,))]
    apart = keras.ops.square(tower(inputs[0]) - tower(inputs[1]))
    distance = keras.ops.sqrt(keras.ops.maximum(keras.ops.sum(apart, axis=1, keepdims=True), 1e-7))

    def contrast(y_true: Any, y_pred: Any) -> Any:
        near = (1 - y_true) * keras.ops.square(y_pred)
        return keras.ops.mean(near + y_true * keras.ops.square(keras.ops.maximum(1 - y_pred, 0)))

    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(distance))
    compiled(model, keras.optimizers.RMSprop(0.01), loss=contrast, metrics=["accuracy"])
    return fitted(model, [x, x[::-1]], (y != y[::-1]).astype("float64")[:, None], validation_split=0.2)


class Placed(keras.layers.Layer):
    """Adds a vector for its place to that of each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = keras.layers.Embedding(9, 4), keras.layers.Embedding(6, 4)

    def call(self, given: Any) -> Any:
        return self.words(given) + self.places(keras.ops.arange(keras.ops.shape(given)[-1]))


def attention() -> Any:
    """keras-io: text_classification_with_transformer, without dropout."""
    words = np.random.randint(0, 9, (ROWS, 6))
    layers = keras.layers
    inputs = keras.Input((6,), dtype="int32")
    hidden = Placed()(inputs)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden))
    hidden = layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, layers.Dense(2, "softmax")(hidden))
    return fitted(compiled(model, "adam"), words, (words[:, 0] > 4).astype(int))


def counted_classes() -> Any:
    """keras-io: imbalanced_classification. Counts what is found, with weights of classes."""
    counts = [keras.metrics.FalseNegatives(), keras.metrics.TruePositives(), keras.metrics.Precision()]
    rare = (y == 0).astype("uint8")[:, None]
    layers = [keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(1, "sigmoid")]
    model = compiled(keras.Sequential(layers), "adam", loss="binary_crossentropy", metrics=counts)
    return fitted(model, x, rare, class_weight={0: 1 / 40, 1: 1 / 13})


# Refused


def everything_at_once() -> Any:
    """keras-io: collaborative_filtering_movielens. The product of two tables is one number for the batch."""

    class Product(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Embedding(5, 3), keras.layers.Embedding(5, 3)
            self.bias = keras.layers.Embedding(5, 1)

        def call(self, given: Any) -> Any:
            both = keras.ops.tensordot(self.first(given[:, 0]), self.second(given[:, 1]), 2)
            return keras.ops.sigmoid(both + self.bias(given[:, 0]))

    words = np.random.randint(0, 5, (ROWS, 2))
    return fitted(compiled(Product(), "adam", loss="binary_crossentropy", metrics=[]), words, y[:, None] / 2)


def batch_norm() -> Any:
    return fitted(compiled(make_model(keras.layers.BatchNormalization(name="normalise"))))


def sum_reduction() -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum", name="added")
    return fitted(compiled(make_model(), loss=loss))


def sum_in_a_function() -> Any:
    def squares(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sum(keras.ops.square(y_pred - keras.ops.one_hot(keras.ops.cast(y_true, "int32"), 3)))

    return fitted(compiled(make_model(), loss=squares, metrics=[]))


def batch_negatives() -> Any:
    def contrast(y_true: Any, y_pred: Any) -> Any:
        return -keras.ops.mean(
            keras.ops.diagonal(keras.ops.log_softmax(y_pred @ keras.ops.transpose(y_pred)))
        )

    return fitted(compiled(make_model(), loss=contrast, metrics=[]))


def masked() -> Any:
    words = np.random.randint(0, 5, (ROWS, 6))
    layers = [keras.Input((6,)), keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.Dense(1)]
    return fitted(compiled(keras.Sequential(layers), loss="mse", metrics=[]), words, words[..., None] * 0.5)


def metric_of_the_batch() -> Any:
    def spread(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_pred)))

    return fitted(compiled(make_model(), metrics=[spread]))


class OwnStep(keras.Sequential):
    def train_step(self, *given: Any) -> Any:
        return super().train_step(*given)


def own_step() -> Any:
    return fitted(compiled(OwnStep(make_model().layers)))


def on_batch() -> Any:
    model = compiled(make_model())
    return model, model.train_on_batch(x[:4], y[:4])


def fixed_size() -> Any:
    model = keras.Sequential([keras.Input(batch_shape=(10, 4)), keras.layers.Dense(3, "softmax")])
    return fitted(compiled(model), batch_size=10)


def stateful() -> Any:
    recurrent = keras.layers.SimpleRNN(3, stateful=True)
    model = keras.Sequential(
        [keras.Input(batch_shape=(10, 4, 1)), recurrent, keras.layers.Dense(3, "softmax")]
    )
    return fitted(compiled(model), x[:50, :, None], y[:50], batch_size=10)


def different_arrays() -> Any:
    return fitted(compiled(make_model()), np.random.default_rng().normal(size=x.shape), y)


def different_orders() -> Any:
    orders = (np.random.default_rng().permutation(ROWS)[:8] for _ in range(9))
    return fitted(compiled(make_model()), ((x[rows], y[rows]) for rows in orders), epochs=1)


def compiled_by_xla() -> Any:
    return fitted(compiled(make_model(), jit_compile=True))


if __name__ == "__main__":
    training: Callable[[], Any] = globals()[sys.argv[1]]
    model, history = training()
