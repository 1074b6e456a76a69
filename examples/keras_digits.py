"""Learns to read handwritten digits with `model.fit`, on as many ranks as there are and any backend of Keras.

    KERAS_BACKEND=tensorflow hvdrun -np 2 python examples/keras_digits.py

KERAS_BACKEND=torch and KERAS_BACKEND=jax work too, and so does `python examples/keras_digits.py`: that is a
world of one.
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
    """Prints a line after each epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss, accuracy = logs["loss"], logs["val_accuracy"]
        print(f"epoch {epoch + 1:2}: loss {loss:.4f}, test accuracy {accuracy:.2%}", flush=True)


def main() -> None:
    parser = options_of(__doc__, epochs=10)
    parser.add_argument("--save", metavar="FILE.keras", help="where rank 0 saves the best model")
    options = parser.parse_args()
    hvd.init()
    keras.utils.set_random_seed(1 + hvd.rank())  # for dropout; the weights are broadcast
    images, test_images, labels, test_labels = load()
    train = hvd.shard_arrays(images, labels, batch_size=options.batch_size)
    test = hvd.shard_arrays(test_images, test_labels, batch_size=256, shuffle=False, uneven="keep")

    rate = options.lr * hvd.size() ** 0.5
    model = make_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # all ranks start alike
        hvd.callbacks.MetricAverageCallback(),  # before whatever looks at the metrics
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
    ]
    if options.save:
        callbacks.append(hvd.callbacks.BestModelCheckpoint(options.save, monitor="val_accuracy"))
    if hvd.rank() == 0:
        callbacks.append(Report())
    model.fit(train, validation_data=test, epochs=options.epochs, callbacks=callbacks, verbose=0)
    hvd.shutdown()


if __name__ == "__main__":
    main()
