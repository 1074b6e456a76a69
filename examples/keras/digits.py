"""Learns to read handwritten digits with `model.fit`, on as many ranks as there are and any backend of Keras.

    KERAS_BACKEND=tensorflow hvdrun -np 2 python examples/keras/digits.py

KERAS_BACKEND=torch and KERAS_BACKEND=jax work too, and so does `python examples/keras/digits.py`: that is a
world of one.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import sirtaki.keras as hvd

TEST_IMAGES = 360


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate for one rank")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
    parser.add_argument("--save", metavar="FILE.keras", help="where rank 0 saves the best model")
    return parser.parse_args()


def load() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Images of 8 x 8 grey values, 1,437 to learn from and 360 others, in the same order on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1).astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


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
    options = arguments()
    hvd.init()
    keras.utils.set_random_seed(1 + hvd.rank())  # for dropout; the weights are broadcast
    train, test = load()
    images = hvd.shard_arrays(*train, batch_size=options.batch_size)
    test_images = hvd.shard_arrays(*test, batch_size=256, shuffle=False, uneven="keep")

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
    model.fit(images, validation_data=test_images, epochs=options.epochs, callbacks=callbacks, verbose=0)
    hvd.shutdown()


if __name__ == "__main__":
    main()
