"""Learns to read handwritten digits with `model.fit`, on ranks that may be lost and join.

    KERAS_BACKEND=tensorflow hvdrun -np 3 --min-np 1 python examples/elastic_keras_digits.py

KERAS_BACKEND=torch and KERAS_BACKEND=jax work too. Kill one of its processes (`kill -9`): the others go on
where they were, and a new one takes its place. Alone, `python examples/elastic_keras_digits.py` works too.
"""

from __future__ import annotations

from typing import Any

import keras
from digits_data import load, options_of

import sirtaki.keras as hvd


def make_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )


class Report(keras.callbacks.Callback):
    """Prints a line after each epoch, on rank 0."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if hvd.is_root():
            share = logs["val_accuracy"]
            print(f"epoch {epoch + 1:2}: test accuracy {share:.2%} on {hvd.size()} rank(s)", flush=True)


@hvd.elastic.run
def train(state: Any, test: Any, options: Any) -> None:
    """Begins anew whenever the ranks have changed, and goes on from the state: the last commit."""
    state.model.optimizer.learning_rate = options.lr * hvd.size() ** 0.5
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),  # before whatever looks at the metrics
        Report(),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state),  # after all that changes the state
    ]
    state.model.fit(
        state.data,
        validation_data=test,
        initial_epoch=state.epoch,
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=0,
    )


def main() -> None:
    options = options_of(__doc__, epochs=10).parse_args()
    hvd.init()
    keras.utils.set_random_seed(1 + hvd.rank())  # for dropout; the weights are those of rank 0
    images, test_images, labels, test_labels = load()
    data = hvd.shard_arrays(images, labels, batch_size=options.batch_size)
    test = hvd.shard_arrays(test_images, test_labels, batch_size=256, shuffle=False, uneven="keep")

    model = make_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(options.lr)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    # With the data, the state knows which samples of the epoch are left; all ranks that live share them.
    state = hvd.elastic.KerasState(model, data=data, epoch=0, batch=0)
    train(state, test, options)
    hvd.shutdown()


if __name__ == "__main__":
    main()
