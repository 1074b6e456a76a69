"""Gradients that a distributed optimizer of Keras applies: exact, in small integers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import sirtaki.keras as hvd
from cases import case


def variables(count: int = 3) -> list[Any]:
    return [
        keras.Variable(np.zeros((2, index + 1)), dtype="float32", name=f"v{index}") for index in range(count)
    ]


def applied(optimizer: Any, factors: list[float | None], found: list[Any] | None = None) -> list[Any]:
    """Takes a step of length 1 from zero, with a gradient of `factor` in each variable; returns the sums."""
    found = found or variables(len(factors))
    gradients = [
        None if factor is None else keras.ops.convert_to_tensor(np.full(one.shape, factor, np.float32))
        for factor, one in zip(factors, found, strict=True)
    ]
    optimizer.apply(gradients, found)
    return [-keras.ops.convert_to_numpy(one) for one in found]


def assert_are(found: list[Any], expected: list[float]) -> None:
    for array, value in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, np.full_like(array, value))


def mean_of_ranks() -> float:
    return (hvd.size() - 1) / 2


def sgd(**options: Any) -> Any:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)


@case()
def averaged() -> None:
    rank, mean = hvd.rank(), mean_of_ranks()
    assert_are(applied(sgd(), [2 * rank, 4 * rank, 6 * rank + 1]), [2 * mean, 4 * mean, 6 * mean + 1])


@case()
def added_up() -> None:
    total = mean_of_ranks() * hvd.size()
    assert_are(applied(sgd(op=hvd.Sum), [hvd.rank()] * 3), [total] * 3)


@case(groups=[1, 2, 5, "lists"])
def in_groups(groups: Any) -> None:
    found = variables()
    lists = [[found[2], found[0]]] if groups == "lists" else groups
    optimizer = sgd(groups=lists, gradient_predivide_factor=2.0)
    assert_are(applied(optimizer, [8.0 * hvd.rank()] * 3, found), [8 * mean_of_ranks()] * 3)
    optimizer = sgd(num_groups=2)
    assert_are(applied(optimizer, [8.0 * hvd.rank()] * 3), [8 * mean_of_ranks()] * 3)


@case(kind=["fp16", "bf16"])
def compressed(kind: str) -> None:
    """Uses integers that 16 bits hold, and whose sum they hold, too."""
    optimizer = sgd(compression=getattr(hvd.Compression, kind))
    assert_are(applied(optimizer, [2.0 * hvd.rank()] * 2), [2 * mean_of_ranks()] * 2)


@case(least=2)
def what_stays_on_a_rank() -> None:
    found, rank, size = variables(), hvd.rank(), hvd.size()
    optimizer = sgd()
    optimizer.register_local_var(found[1])
    mean = mean_of_ranks()
    assert_are(applied(optimizer, [4.0 * rank] * 3, found), [4 * mean, 4 * rank / size, 4 * mean])
    optimizer = sgd(scale_local_gradients=False)
    found = variables()
    optimizer.register_local_var(found[1])
    assert_are(applied(optimizer, [4.0 * rank] * 3, found), [4 * mean, 4 * rank, 4 * mean])


@case(least=2)
def layers_that_stay_on_a_rank() -> None:
    """Layers may also get their variables later."""
    shared, own = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=own, scale_local_gradients=False
    )
    for layer in (shared, own):
        layer.build((None, 2))
        layer.set_weights([np.zeros((2, 1))])
    found = applied(optimizer, [2.0 * hvd.rank()] * 2, [shared.kernel, own.kernel])
    assert_are(found, [2 * mean_of_ranks(), 2 * hvd.rank()])


@case()
def what_nobody_has() -> None:
    """A variable without a gradient on any rank does not change, also with weight decay."""
    found = variables(2)
    found[1].assign(np.ones(found[1].shape))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.5))
    assert_are(applied(optimizer, [2.0 * hvd.rank(), None], found), [2 * mean_of_ranks(), -1])


@case(least=2)
def what_some_ranks_have() -> None:
    """A missing gradient counts as zero, and its rank takes part in the step."""
    if keras.backend.backend() != "torch":
        return  # elsewhere a graph decides which variables have a gradient, alike on all ranks
    optimizer = sgd(compression=hvd.Compression.bf16)
    found = applied(optimizer, [2.0, 4.0 if hvd.rank() == 0 else None])
    assert_are(found, [2, 4 / hvd.size()])


@case()
def what_keras_stores_as_it_is() -> None:
    """The scaling maxima of 8-bit floats are no gradients: the ranks use the largest of all ranks."""
    found = variables(2)
    found[1].overwrite_with_gradient = True
    assert_are(
        applied(sgd(), [2.0 * hvd.rank(), 3.0 * hvd.rank()], found), [2 * mean_of_ranks(), 3 - 3 * hvd.size()]
    )


@case(passes=["backward_passes_per_step", "gradient_accumulation_steps"])
def what_keras_stores_as_it_is_after_several_passes(passes: str) -> None:
    """The largest value of all passes and ranks; a sum of passes is none of it."""
    rank, mean, is_sum = hvd.rank(), mean_of_ranks(), passes == "backward_passes_per_step"
    if is_sum:
        optimizer = sgd(backward_passes_per_step=2)
    else:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    found = variables(3)
    found[0].overwrite_with_gradient = True
    assert_are(applied(optimizer, [3.0 * rank, 2.0 * rank, 2.0 * rank], found), [0, 0, 0])
    total = (6 if is_sum else 3) * mean
    assert_are(
        applied(optimizer, [1.0 * rank, 4.0 * rank, 4.0 * rank], found), [3 - 3 * hvd.size(), total, total]
    )


@case()
def accumulated_in_several_optimizers() -> None:
    """Two optimizers that are used in turns do not affect each other."""
    first, second = sgd(backward_passes_per_step=2), sgd()
    one, other = variables(2), variables(2)
    assert_are(applied(first, [2.0 * hvd.rank()] * 2, one), [0, 0])
    assert_are(applied(second, [4.0 * hvd.rank()] * 2, other), [4 * mean_of_ranks()] * 2)
    assert_are(applied(first, [6.0 * hvd.rank()] * 2, one), [8 * mean_of_ranks()] * 2)
