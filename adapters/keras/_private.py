"""The private symbols of Keras and of tf.data that this package uses. Keras' are found at its import."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras

from sirtaki.common.private_api import Framework

_KERAS = Framework("keras", keras.__version__, "3.15")
_KERAS.symbol("keras.optimizers.Optimizer._clip_gradients")  # wrapping.Distributed extends it
_KERAS.symbol("keras.layers.Layer._flatten_layers")


def layers_of(model: Any) -> Sequence[Any]:
    """Returns a model, and all layers inside it."""
    return list(model._flatten_layers())


def trainable_variables_of(optimizer: Any) -> Sequence[Any]:
    """Returns the variables that an optimizer was built for."""
    return _KERAS.attribute(optimizer, "_trainable_variables")


def inputs_of(dataset: Any) -> Sequence[Any]:
    """Returns the datasets that a tf.data.Dataset reads."""
    return _tensorflow().attribute(dataset, "_inputs")()


def functions_of(dataset: Any) -> Sequence[Any]:
    """Returns the functions that a tf.data.Dataset calls."""
    return _tensorflow().attribute(dataset, "_functions")()


def _tensorflow() -> Framework:
    return Framework("tensorflow", sys.modules["tensorflow"].__version__, "2.15, 2.18 and 2.21")
