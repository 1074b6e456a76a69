"""Learns to read handwritten digits, on as many ranks as there are, in a loop of its own.

    hvdrun -np 2 python examples/tensorflow_digits.py

`python examples/tensorflow_digits.py` works too: that is a world of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import keras
import tensorflow as tf
from digits_data import load, options_of

import sirtaki.tensorflow as hvd


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )


def make_step(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Callable[..., tf.Tensor]:
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # its gradients are averaged over the ranks
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def accuracy(model: keras.Model, batches: tf.data.Dataset) -> tf.Tensor:
    """The share of this rank's test images that are read correctly."""
    right = [tf.argmax(model(images), 1) == labels for images, labels in batches]
    return tf.reduce_mean(tf.cast(tf.concat(right, 0), tf.float32))


def main() -> None:
    options = options_of(__doc__).parse_args()
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    images, test_images, labels, test_labels = load()
    train_set = tf.data.Dataset.from_tensor_slices((images, labels))
    test_set = tf.data.Dataset.from_tensor_slices((test_images, test_labels))
    shuffled = train_set.shuffle(
        len(train_set), seed=0
    )  # alike on all ranks, and in another order each epoch
    steps = len(train_set) // hvd.size() // options.batch_size
    batches = (
        shuffled.shard(hvd.size(), hvd.rank()).batch(options.batch_size, drop_remainder=True).take(steps)
    )
    test_batches = test_set.shard(hvd.size(), hvd.rank()).batch(256)

    model = make_model()
    optimizer = keras.optimizers.Adam(options.lr * hvd.size() ** 0.5)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.weights + optimizer.variables, root_rank=0)  # all ranks start alike

    step = make_step(model, optimizer)
    for epoch in range(options.epochs):
        start = time.perf_counter()
        losses = [step(images, labels) for images, labels in batches]
        seconds = time.perf_counter() - start
        mean_loss, right = hvd.grouped_allreduce([tf.reduce_mean(losses), accuracy(model, test_batches)])
        if hvd.rank() == 0:
            speed = steps * options.batch_size * hvd.size() / seconds
            print(
                f"epoch {epoch + 1:2}: loss {mean_loss:.4f}, test accuracy {right:.2%}, "
                f"{speed:,.0f} images/s on {hvd.size()} rank(s)",
                flush=True,
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
