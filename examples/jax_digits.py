"""Learns to read handwritten digits with Flax and optax, on as many ranks as there are.

    hvdrun -np 2 python examples/jax_digits.py

`python examples/jax_digits.py` works too: that is a world of one.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_data import load, options_of
from flax import linen as nn

import sirtaki.jax as hvd


class Network(nn.Module):
    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(len(images), -1)
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


def own_batches(images: Any, labels: Any, size: int, epoch: int) -> list[tuple[Any, Any]]:
    """This rank's batches of an epoch: as many, and as long, on every rank."""
    order = np.random.default_rng(epoch).permutation(len(labels))[hvd.rank() :: hvd.size()]
    order = order[: len(labels) // hvd.size() // size * size].reshape(-1, size)
    return [(images[places], labels[places]) for places in order]


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def train_step(optimizer: Any, params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, Any]:
    def loss_of(params: Any) -> Any:
        logits = Network().apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)  # averages the gradients over the ranks
    return optax.apply_updates(params, updates), state, loss


@jax.jit
def accuracy(params: Any, images: Any, labels: Any) -> Any:
    return (Network().apply(params, images).argmax(-1) == labels).mean()


def main() -> None:
    options = options_of(__doc__).parse_args()
    hvd.init()
    images, test_images, labels, test_labels = load()
    own_test_set = [part[hvd.rank() :: hvd.size()] for part in (test_images, test_labels)]
    optimizer = hvd.DistributedOptimizer(optax.adam(options.lr * hvd.size() ** 0.5))
    params = Network().init(jax.random.key(hvd.rank()), images[:1])
    params = hvd.broadcast_parameters(params, root_rank=0)  # all ranks start alike
    state = optimizer.init(params)
    for epoch in range(options.epochs):
        start, losses = time.perf_counter(), []
        batches = own_batches(images, labels, options.batch_size, epoch)
        for batch in batches:
            params, state, loss = train_step(optimizer, params, state, *batch)
            losses.append(loss)
        own = {"loss": jnp.mean(jnp.stack(losses)), "accuracy": accuracy(params, *own_test_set)}
        means = hvd.allreduce(own, name="means")
        if hvd.rank() == 0:
            speed = len(batches) * options.batch_size * hvd.size() / (time.perf_counter() - start)
            print(
                f"epoch {epoch + 1:2}: loss {means['loss']:.4f}, test accuracy {means['accuracy']:.2%}, "
                f"{speed:,.0f} images/s on {hvd.size()} rank(s)",
                flush=True,
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
