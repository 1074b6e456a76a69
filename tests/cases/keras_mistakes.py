"""Wrong use of sirtaki.keras, and the resulting errors."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import keras
import numpy as np
import pytest

import sirtaki.keras as hvd
from cases import case
from cases.keras_models import make_model


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "op": ({"op": hvd.Min}, "op has to be Average or Sum"),
    "predivide and sum": ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
    "predivide": ({"gradient_predivide_factor": 0.0}, "has to be a positive number"),
    "infinite predivide": ({"gradient_predivide_factor": math.inf}, "has to be a positive number"),
    "passes": ({"backward_passes_per_step": 0}, "one pass at least"),
    "groups": ({"groups": -1}, "number of groups"),
    "no groups": ({"groups": [1, 2]}, "list of lists of variables"),
}


@case(what=list(WRONG))
def wrong_arguments(what: str) -> None:
    arguments, text = WRONG[what]
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(sgd(), **arguments)


@case()
def a_variable_in_two_groups() -> None:
    one = keras.Variable(np.zeros(2))
    with pytest.raises(ValueError, match="in groups twice"):
        hvd.DistributedOptimizer(sgd(), groups=[[one], [one]])


@case()
def distributed_twice() -> None:
    optimizer = hvd.DistributedOptimizer(sgd())
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))


@case()
def no_optimizer_of_keras_3() -> None:
    with pytest.raises(ValueError, match=r"such as keras\.optimizers\.Adam\(\), not 'sgd'"):
        hvd.DistributedOptimizer("sgd")
    legacy = type("SGD", (), {"__module__": "tf_keras.src.optimizers.sgd"})
    with pytest.raises(ValueError, match="is an optimizer of Keras 2"):
        hvd.DistributedOptimizer(legacy())


@case()
def passes_said_twice() -> None:
    with pytest.raises(ValueError, match="not both"):
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), backward_passes_per_step=2
        )
    used = sgd()
    used.build(make_model().trainable_weights)
    with pytest.raises(ValueError, match="has not been used yet"):
        hvd.DistributedOptimizer(used, backward_passes_per_step=2)


@case()
def gradients_of_other_variables() -> None:
    """Keras reports that a layer has been frozen since the optimizer was built."""
    if keras.backend.backend() == "tensorflow":
        pytest.skip("Keras refuses stateless_apply there")
    optimizer, weights = hvd.DistributedOptimizer(sgd()), make_model().trainable_weights
    optimizer.build(weights)
    values = [keras.ops.convert_to_tensor(weight) for weight in weights[:2]]
    with pytest.raises(ValueError, match="1:1"):
        optimizer.stateless_apply([variable.value for variable in optimizer.variables], values, values)


@case()
def local_layers_that_are_none() -> None:
    with pytest.raises(ValueError, match="layers of Keras, and Variable is none"):
        hvd.PartialDistributedOptimizer(sgd(), local_layers=[keras.Variable(np.zeros(2))])


@case()
def before_init() -> None:
    hvd.shutdown()
    for call in (
        lambda: hvd.DistributedOptimizer(sgd()),
        lambda: hvd.broadcast_model(make_model()),
        lambda: hvd.allreduce(1.0),
        lambda: hvd.verbose(1),
        lambda: hvd.shard_arrays(np.zeros(4)),
        lambda: hvd.callbacks.LearningRateWarmupCallback(0.1),
    ):
        with pytest.raises(ValueError, match=r"call hvd.init\(\)"):
            call()


@case(least=2)
def different_models() -> None:
    """All ranks get the error, and continue."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2 + hvd.rank())])
    with pytest.raises(ValueError, match=r"variable 0 .*is of shape \(3, 3\) .* on rank 1, but \(3, 2\)"):
        hvd.broadcast_model(model)
    layers = [keras.layers.Dense(2) for _ in range(1 + hvd.rank())]
    with pytest.raises(ValueError, match="rank 1 has 4 variables to broadcast, rank 0 has 2"):
        hvd.broadcast_model(keras.Sequential([keras.Input((2,)), *layers]))
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


@case()
def the_name_that_horovod_has() -> None:
    """`sirtaki.tensorflow.keras` works on every backend."""
    if importlib.util.find_spec("tensorflow") is None:
        return
    from sirtaki.tensorflow import keras as other
    from sirtaki.tensorflow.keras.callbacks import MetricAverageCallback

    assert other.DistributedOptimizer is hvd.DistributedOptimizer
    assert other.callbacks.MetricAverageCallback is MetricAverageCallback
    assert set(other.__all__) == set(hvd.__all__)


@case()
def callbacks_without_what_they_need() -> None:
    with pytest.raises(ValueError, match="initial_lr has to be given"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.1)
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, staircase=False)
    schedule.set_params({"steps": None})
    with pytest.raises(ValueError, match="give steps_per_epoch"):
        schedule.on_train_batch_begin(0)


@case()
def compressions_that_need_a_memory() -> None:
    for name in ("powersgd", "topk", "onebit", "int8", "fp8"):
        make = getattr(hvd.Compression, name)
        with pytest.raises(ValueError, match=r"only the optimizers of sirtaki\.torch"):
            make()
