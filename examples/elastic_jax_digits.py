"""Learns to read handwritten digits with Flax and optax, on ranks that may be lost and join.

    hvdrun -np 3 --min-np 1 python examples/elastic_jax_digits.py

Kill one of its processes (`kill -9`): the others go on where they were, and a new one takes its place. Alone,
`python examples/elastic_jax_digits.py` works too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
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


def own_batch(order: Any, count: int) -> tuple[Any, Any]:
    """This rank's part of the next samples of an epoch, and a weight for each. All ranks take `count`.

    At the end of an epoch there are fewer: the rest of a batch has weight 0. So each sample counts once, and
    all batches have one shape, for which the step is compiled.
    """
    next_ones = order[: count * hvd.size()]
    own = next_ones[hvd.rank() :: hvd.size()]
    weights = np.zeros(count, np.float32)
    weights[: len(own)] = hvd.size() / len(next_ones)  # the average over the ranks divides by their number
    return np.resize(own if len(own) else next_ones, count), weights


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def train_step(optimizer: Any, params: Any, state: Any, batch: tuple[Any, Any, Any], rate: float) -> Any:
    images, labels, weights = batch

    def loss_of(params: Any) -> Any:
        logits = Network().apply(params, images)
        return (weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels)).sum()

    updates, state = optimizer.update(jax.grad(loss_of)(params), state, params)  # averages over the ranks
    return jax.tree.map(lambda one, update: one - rate * update, params, updates), state


def accuracy(params: Any, images: Any, labels: Any) -> float:
    """The share of test images that are read correctly; each rank looks at its own part of them."""
    own = slice(hvd.rank(), None, hvd.size())
    right = (Network().apply(params, images[own]).argmax(-1) == labels[own]).sum()
    return int(hvd.allreduce(right, op=hvd.Sum, name="right")) / len(labels)


@hvd.elastic.run
def train(state: Any, optimizer: Any, data: tuple[Any, Any, Any, Any], options: Any) -> None:
    """Begins anew whenever the ranks have changed, and goes on from the state: the last commit."""
    images, test_images, labels, test_labels = data
    rate = options.lr * hvd.size() ** 0.5
    while state.epoch < options.epochs:
        order = np.random.default_rng(state.epoch).permutation(len(labels))  # the same on all ranks
        while state.done < len(labels):
            places, weights = own_batch(order[state.done :], options.batch_size)
            batch = images[places], labels[places], weights
            state.params, state.moments = train_step(optimizer, state.params, state.moments, batch, rate)
            state.done += options.batch_size * hvd.size()
            state.commit()
        share = accuracy(state.params, test_images, test_labels)
        if hvd.is_root():
            print(f"epoch {state.epoch + 1:2}: test accuracy {share:.2%} on {hvd.size()} rank(s)", flush=True)
        state.epoch, state.done = state.epoch + 1, 0
        state.commit()


def main() -> None:
    options = options_of(__doc__).parse_args()
    hvd.init()
    data = load()
    optimizer = hvd.DistributedOptimizer(optax.scale_by_adam())
    params = Network().init(jax.random.key(0), data[0][:1])
    train(
        hvd.elastic.JaxState(params=params, moments=optimizer.init(params), epoch=0, done=0),
        optimizer,
        data,
        options,
    )
    hvd.shutdown()


if __name__ == "__main__":
    main()
