"""The time in which eager steps of Keras wait for their exchange."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import keras
import numpy as np
from exposed_waits import assert_exposed, assert_late_rank_is_waited_for, exposed_seconds

import sirtaki.keras as hvd
from cases import case
from cases.keras_models import BATCH, data_of, make_model
from sirtaki.bindings.context import current

STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard": "state"},
    "in groups": {"compression": hvd.Compression.fp16, "num_groups": 2},
}


class Training:
    """Eager steps of two variables."""

    def __init__(self, **options: Any) -> None:
        self.variables = [keras.Variable(np.ones(size, np.float32), name=f"v{size}") for size in (3, 2)]
        self._optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)

    def step(self) -> None:
        factor = hvd.rank() + 1.0
        self._optimizer.apply([keras.ops.ones(one.shape) * factor for one in self.variables], self.variables)


@case(least=2, kind=list(OPTIONS))
def eager_steps_wait_for_their_exchanges(kind: str) -> None:
    training = Training(**OPTIONS[kind])
    for _ in range(STEPS):
        training.step()
    updates = 2 if kind == "sharded" else 0  # there is one for each variable
    assert_exposed("gradient.", 2 + updates)


@case(least=2)
def others_wait_for_a_late_rank() -> None:
    training = Training()
    training.step()
    assert_late_rank_is_waited_for(training.step)


@case(least=2)
def compiled_steps_measure_nothing() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(*data_of(hvd.rank()), batch_size=BATCH, verbose=0)
    is_eager = keras.backend.backend() == "torch"  # Keras does not compile its steps
    assert (exposed_seconds() is not None) == is_eager


@case(least=2)
def nothing_is_measured_on_gpus() -> None:
    on_gpu = {
        "jax": lambda: mock.patch.object(
            type(keras.ops.ones(1)), "devices", return_value=[SimpleNamespace(platform="cuda")]
        ),
        "tensorflow": lambda: mock.patch("tensorflow.config.list_logical_devices", return_value=["GPU:0"]),
        "torch": lambda: mock.patch("sirtaki.torch.device.exposed", return_value=nullcontext()),
    }
    training = Training()
    with on_gpu[keras.backend.backend()]():
        training.step()
    assert exposed_seconds() is None
    training.step()
    assert exposed_seconds() is not None


@case(least=2)
def own_computations_are_not_exposed() -> None:
    if keras.backend.backend() != "jax":  # the others compute when they are called
        return
    import jax

    training = Training()
    training.step()
    exposed, seen = current().steps.exposed, []
    before = len(exposed.recent)

    def computed(arrays: list[Any]) -> None:
        seen.append((len(exposed.recent), [one.shape for one in arrays]))

    with mock.patch.object(jax, "block_until_ready", computed):
        training.step()
    assert seen == [(before, [one.shape for one in training.variables])]  # before the next wait
    assert len(exposed.recent) == before + 1
