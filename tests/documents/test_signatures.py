"""Functions have the parameters of Horovod 0.28's functions, in the same order; new parameters follow."""

from __future__ import annotations

import copy
import inspect
import pickle
from importlib import import_module
from typing import Any

import pytest

_COMBINED = (
    "average device_dense device_sparse compression op prescale_factor postscale_factor "
    "{} process_set ignore_name_scope {}"
)
_GRADIENTS = "compression sparse_as_dense op gradient_predivide_factor num_groups groups process_set"
_OF_KERAS = (
    "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op "
    "backward_passes_per_step average_aggregated_gradients"
)

ADAPTERS = ("numpy", "torch", "tensorflow", "keras", "jax")

TENSORFLOW = {
    "allreduce": f"tensor {_COMBINED.format('name', '')}",
    "grouped_allreduce": f"tensors {_COMBINED.format('', 'name')}",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "reducescatter": (
        "tensor device_dense compression op name process_set ignore_name_scope "
        "prescale_factor postscale_factor"
    ),
    "grouped_reducescatter": (
        "tensors device_dense compression op process_set prescale_factor postscale_factor"
    ),
    "size_op": "process_set_id name",
    "process_set_included_op": "process_set_id name",
    "rank_op": "name",
    "local_rank_op": "name",
    "local_size_op": "name",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank device",
    "broadcast_object": "obj root_rank session name process_set",
    "broadcast_object_fn": "root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "DistributedOptimizer": (
        "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
        "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients "
        "num_groups groups process_set scale_local_gradients"
    ),
    "DistributedGradientTape": f"gradtape device_dense device_sparse {_GRADIENTS} scale_local_gradients",
    "PartialDistributedGradientTape": (
        f"gradtape device_dense device_sparse {_GRADIENTS} local_layers scale_local_gradients"
    ),
}
KERAS = {
    "DistributedOptimizer": f"{_OF_KERAS} num_groups groups process_set scale_local_gradients",
    "allreduce": "value name average prescale_factor postscale_factor op compression",
    "allgather": "value name",
    "broadcast": "value root_rank name",
    "reducescatter": "value name op",
    "load_model": "filepath custom_optimizers custom_objects compression",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank device local_variables",
    "callbacks.MetricAverageCallback": "device",
    "callbacks.LearningRateScheduleCallback": (
        "initial_lr multiplier start_epoch end_epoch staircase momentum_correction steps_per_epoch"
    ),
    "callbacks.LearningRateWarmupCallback": (
        "initial_lr warmup_epochs momentum_correction steps_per_epoch verbose"
    ),
}
MODULES = {"tensorflow": TENSORFLOW, "keras": KERAS}


def find(module: str, name: str) -> Any:
    pytest.importorskip(module)
    found: Any = import_module(f"sirtaki.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in MODULES.items() for name in sorted(names)]
)
def test_a_function_takes_what_that_of_horovod_does(module: str, name: str) -> None:
    expected = MODULES[module][name].split()
    ours = list(inspect.signature(find(module, name)).parameters)
    assert ours[: len(expected)] == expected


def test_what_horovods_modules_for_keras_order_differently_has_to_be_named() -> None:
    """The tenth argument is num_groups in horovod.keras, but another one in horovod.tensorflow.keras."""
    parameters = inspect.signature(find("keras", "DistributedOptimizer")).parameters
    positional = [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY]
    assert positional == _OF_KERAS.split()[:8]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_editors_are_shown_public_names_alone(adapter: str) -> None:
    module = import_module(f"sirtaki.{adapter}")
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in dir(module))


@pytest.mark.parametrize("adapter", ["numpy", "torch"])
def test_collectives_are_known_by_their_public_names(adapter: str) -> None:
    """Most are methods of one object. Programs copy and pickle them as functions, inside of models too."""
    pytest.importorskip(adapter)
    hvd = import_module(f"sirtaki.{adapter}")
    folder = "ops." if adapter == "torch" else ""
    names = import_module(f"sirtaki.{adapter}.{folder}collectives").__all__
    for name in names:
        collective = getattr(hvd, name)
        assert (collective.__name__, bool(collective.__doc__)) == (name, True)
        assert copy.deepcopy(collective) == collective
        if "_async" not in name:
            assert pickle.loads(pickle.dumps(collective)) == collective
    for name in (name for name in names if "_async" in name):
        waiting, handle = getattr(hvd, name.replace("_async", "")), getattr(hvd, name)
        taken = [*inspect.signature(handle).parameters]
        assert taken == [key for key in inspect.signature(waiting).parameters if key in taken], name
        assert inspect.signature(handle).return_annotation.startswith("Handle["), name
