"""Gradients on the TensorFlow backend: tensors and IndexedSlices, eagerly and in functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sirtaki.bindings.context import is_elastic
from sirtaki.common.training.groups import Place
from sirtaki.keras.backends import Gradient, GradientCombination
from sirtaki.tensorflow import broadcast_, grouped_allreduce, rank_op, size_op
from sirtaki.tensorflow.training import exchange


def array(tensor: Any) -> Any:
    """Works like `Backend.array`."""
    return np.asarray(tf.convert_to_tensor(tensor))  # np.asarray() of a variable would be a copy


def is_sparse(gradient: Any) -> bool:
    """Returns whether it is IndexedSlices, as the gradients of embeddings are."""
    return isinstance(gradient, tf.IndexedSlices)


def is_eager(gradients: Sequence[Any]) -> bool:
    """Works like `Backend.is_eager`."""
    return tf.executing_eagerly()


def scaled(gradient: Any, factor: Any) -> Any:
    """Works like `Backend.scaled`."""
    if is_sparse(gradient):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def divided(gradient: Any, ranks: int) -> Any:
    """Works like `Backend.divided`."""
    if not is_elastic() or tf.executing_eagerly():
        return scaled(gradient, 1.0 / ranks)
    return scaled(gradient, 1.0 / tf.cast(size_op(), gradient.dtype))


def joined(gradients: list[Any]) -> list[Any]:
    """Works like `Backend.joined`."""
    return exchange.joined(gradients)


def allreduce(name: str, gradients: Sequence[Gradient], how: GradientCombination) -> list[Any]:
    """Works like `Backend.allreduce`. The program defines the gradients, so they are equal on all ranks."""
    results: list[Any] = [None] * len(gradients)
    sparse = [index for index, gradient in enumerate(gradients) if is_sparse(gradient.value)]
    for indices, prescale, postscale, suffix in (
        (
            [i for i, gradient in enumerate(gradients) if not gradient.is_absent and i not in sparse],
            *how[1:3],
            "",
        ),
        (sparse, 1.0, 1.0, ".sparse"),  # the exchange does not add up rows, so nothing can overflow there
    ):
        if indices:
            with exchange.exposed():
                reduced = grouped_allreduce(
                    [gradients[index].value for index in indices],
                    op=how.op,
                    prescale_factor=prescale,
                    postscale_factor=postscale,
                    process_set=how.process_set,
                    name=name + suffix,
                )
            for index, value in zip(indices, reduced, strict=True):
                results[index] = value
    return results


def first_name(name: str, gradients: Sequence[Gradient]) -> str | None:
    """Works like `Backend.first_name`. The exchange of sparse gradients has other operations."""
    dense = [gradient for gradient in gradients if not gradient.is_absent and not is_sparse(gradient.value)]
    if not dense:
        return None
    return name if len(dense) == 1 else f"{name}.0"


def require_place(place: Place) -> None:
    """Works like `Backend.require_place`. A function keeps the variables that it was traced with."""
    if is_elastic() and not tf.executing_eagerly():
        message = (
            "the ranks have changed since this function was traced, and with them the state that shard= "
            "keeps on this rank: make the tf.function in the training function"
        )
        tf.debugging.assert_equal([rank_op(), size_op()], list(place), message)


def broadcast(name: str, variables: Sequence[Any], root: int) -> None:
    """Works like `Backend.broadcast`."""
    with exchange.exposed():
        broadcast_([variable.value for variable in variables], root, name)
