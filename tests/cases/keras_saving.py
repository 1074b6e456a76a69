"""Models with distributed optimizers, in files and copies."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import sirtaki.keras as hvd
from cases import case
from cases.keras_models import BATCH, assert_alike, assert_close, data_of, make_model, values_of
from sirtaki.keras.training.optimizer import Distributed


@keras.saving.register_keras_serializable("tests")
class Registered(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Registered": lambda: Registered(0.1, momentum=0.9),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


def trained(optimizer: Any) -> Any:
    model = make_model(dtype="float32")
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = data_of(hvd.rank())
    model.train_on_batch(x[:BATCH], y[:BATCH])
    return model


@case(optimizer=list(OPTIMIZERS))
def a_file_and_back(optimizer: str) -> None:
    """The file is that of the plain optimizer; both ways of loading it continue with its state."""
    model = trained(hvd.DistributedOptimizer(OPTIMIZERS[optimizer]()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        config = zipfile.ZipFile(path).read("config.json").decode()
        plain, again = keras.models.load_model(path), hvd.load_model(path)
    assert "sirtaki" not in config
    assert json.loads(config)["compile_config"]["optimizer"]["class_name"].endswith(optimizer)
    assert not isinstance(plain.optimizer, Distributed)
    assert isinstance(again.optimizer, Distributed)
    for loaded in (plain, again):
        expected, found = values_of(model.optimizer.variables), values_of(loaded.optimizer.variables)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
    x, y = data_of(hvd.rank())
    again.train_on_batch(x[BATCH : 2 * BATCH], y[BATCH : 2 * BATCH])
    assert_alike(again.weights)


@case()
def passes_of_a_loaded_optimizer_add_up() -> None:
    """Their sum, which the file does not name, is used again if the call asks for it."""
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        again = hvd.load_model(path, backward_passes_per_step=2)
        with pytest.raises(ValueError, match="not both"):
            hvd.load_model(path, backward_passes_per_step=3)
    x, y = data_of(hvd.rank())
    for trainee in (model, again):
        trainee.train_on_batch(x[BATCH : 2 * BATCH], y[BATCH : 2 * BATCH])
    assert_close(again, model)


@case()
def a_copy_by_its_configuration() -> None:
    """The copy is the plain optimizer."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=2.0))
    copy = type(optimizer).from_config(optimizer.get_config())
    assert not isinstance(copy, Distributed)
    assert isinstance(copy, keras.optimizers.Adam)
    assert copy.clipnorm == 2.0
