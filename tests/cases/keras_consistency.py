"""Detection of ranks that diverge under Keras: in eager steps, after epochs and at the end of fit."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import sirtaki.keras as hvd
from cases import case
from cases.differing import differ, hints_of
from cases.keras_models import BATCH, data_of, gradients_of, make_model


def compiled(seed: int = 0, **options: Any) -> Any:
    model = make_model(seed)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(hvd.DistributedOptimizer(optimizer), "mse", **options)
    return model


def fit(model: Any, *callbacks: Any, data: Any = None, **options: Any) -> None:
    x, y = data_of(hvd.rank()) if data is None else data
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


def fit_from_one_start(model: Any) -> None:
    """Checks that ranks do not diverge once rank 0's model has been broadcast."""
    hvd.broadcast_model(model)
    hvd.check_parameters(model)
    fit(model)
    hvd.check_parameters(model)


@case(least=2, eagerly=[False, True])
def a_forgotten_broadcast(eagerly: bool) -> None:
    """Without sirtaki's callbacks, it is detected in the second step if that is eager, else when fit ends."""
    model = compiled(seed=int(hvd.rank() == 1), run_eagerly=eagerly)
    differ(
        lambda: fit(model),
        r"'0: (sequential/)?dense/kernel' on rank 1 \(pid \d+ on \S+\) is not as on rank 0 ",
        r"by up to \d",
        r"hvd\.broadcast_model\(model, root_rank=0\)",
    )
    fit_from_one_start(model)


@case(least=2)
def a_model_that_changes_on_one_rank() -> None:
    """A change after the broadcast, like a checkpoint restored on one rank, is detected after the epoch."""
    model = compiled()

    def change(epoch: int, logs: Any) -> None:
        if hvd.rank() == 1:
            model.layers[0].bias.assign(np.full(4, 7.0))

    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    restored = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    differ(lambda: fit(model, broadcast, restored), "dense/bias' on rank 1")


@case(least=2)
def an_optimizer_that_differs() -> None:
    model = compiled()
    model.optimizer.momentum = 0.8 if hvd.rank() == 1 else 0.9
    differ(lambda: hvd.check_parameters(model), r"momentum is 0\.8 on rank 1", "and 0.9 on rank 0")
    model.optimizer.momentum = 0.9
    fit_from_one_start(model)
    model.optimizer.learning_rate = 0.1 * (1 + hvd.rank())  # like ReduceLROnPlateau on the rank's own loss
    differ(lambda: fit(model), r"learning_rate is 0\.2\d* on rank 1")


@case(least=2)
def ranks_with_unequal_numbers_of_batches() -> None:
    model = compiled()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ValueError, match=r"rank 1 is to train 1 epochs of 2 batches, and rank 0 1 of 1: "):
        fit(model, broadcast, steps_per_epoch=min(1 + hvd.rank(), 2))
    fit(model, broadcast)
    hvd.check_parameters(model)


@case(least=2)
def an_optimizer_that_is_distributed_too_late() -> None:
    """The step is compiled already, and would run without an exchange."""
    model = make_model()
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(optimizer, "mse", run_eagerly=False)
    fit(model)
    if keras.backend.backend() == "torch":  # torch compiles nothing
        return
    hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="compiled before DistributedOptimizer was called"):
        fit(model)
    model.compile(optimizer, "mse")
    fit_from_one_start(model)


@case(least=2)
def data_that_no_rank_shares_out() -> None:
    model = compiled()
    average = hvd.callbacks.MetricAverageCallback()
    told = hints_of(lambda: fit(model, average, data=data_of(0)))
    assert sum("have had the same loss, as if from the same batches" in one for one in told) == 1, told
    assert hints_of(lambda: fit(compiled(), hvd.callbacks.MetricAverageCallback())) == []


@case(least=2)
def a_plain_optimizer() -> None:
    model = make_model()
    model.compile("sgd", "mse")
    told = hints_of(lambda: fit(model, hvd.callbacks.BroadcastGlobalVariablesCallback(0)))
    assert len(told) == 1
    assert "each rank trains a model of its own" in told[0]
    scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    model = make_model()
    model.compile(scaled, "mse")
    assert hints_of(lambda: fit(model, hvd.callbacks.BroadcastGlobalVariablesCallback(0))) == []


@case(least=2)
def ranks_that_are_meant_to_differ() -> None:
    """Layers that stay on each rank, and ranks outside the process set, may differ."""
    model = make_model(seed=hvd.rank())
    hvd.broadcast_model(model, local_variables=model.layers[0].weights)
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), local_layers=model.layers[0]
    )
    model.compile(optimizer, "mse")
    fit(model)
    some = hvd.add_process_set([0])
    alone = make_model(seed=hvd.rank())
    alone.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), process_set=some), "mse")
    fit(alone)


@case(least=2)
def running_numbers_of_layers() -> None:
    """The numbers in variables' names count the layers of a process, and may differ between ranks."""
    for _ in range(1 + 2 * hvd.rank()):
        make_model()
    model = compiled(run_eagerly=True)
    fit(model)
    hvd.check_parameters(model)


@case(least=2)
def a_loop_of_ones_own() -> None:
    """In eager mode, the second step compares the ranks."""
    model = make_model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    optimizer.build(model.trainable_variables)

    def step() -> None:
        optimizer.apply(gradients_of(model, *data_of(hvd.rank())), model.trainable_variables)

    step()
    differ(step, "dense/kernel' on rank 1")
