"""The private symbols of Keras and of tf.data that this package uses. Keras' are found at its import."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import keras

from sirtaki.common.private_api import Framework

_KERAS = Framework("keras", keras.__version__, "3.15")
_KERAS.symbol("keras.optimizers.Optimizer._clip_gradients")  # wrapping.Distributed extends it
_KERAS.symbol("keras.optimizers.Optimizer._untrack_variable")
_KERAS.symbol("keras.layers.Layer._flatten_layers")
_TAKING_DATA = ("fit", "train_on_batch", "evaluate", "test_on_batch", "predict", "predict_on_batch")


def layers_of(model: Any) -> Sequence[Any]:
    """Returns a model, and all layers inside it."""
    return list(model._flatten_layers())


def trainable_variables_of(optimizer: Any) -> Sequence[Any]:
    """Returns the variables that an optimizer was built for."""
    return _KERAS.attribute(optimizer, "_trainable_variables")


def set_trainable_variables(optimizer: Any, variables: Sequence[Any]) -> None:
    """Stores the variables that an optimizer was built for, without making them variables of its own."""
    object.__setattr__(optimizer, "_trainable_variables", list(variables))


def slots_of(optimizer: Any) -> dict[str, list[Any]]:
    """Returns the state of an optimizer by the names of its attributes.

    Each is a list with one entry for each variable that the optimizer updates, in the order of
    `_trainable_variables_indices`: a variable, or None.
    """
    count = len(_KERAS.attribute(optimizer, "_trainable_variables_indices"))
    own = {id(variable) for variable in optimizer.variables}
    return {
        name: values
        for name, values in vars(optimizer).items()
        if name != "_variables" and isinstance(values, list) and len(values) == count
        if any(id(value) in own for value in values)
    }


def keep_slots(optimizer: Any, places: Sequence[int]) -> None:
    """Makes an optimizer drop the state of all variables except the variables at `places`."""
    indices = _KERAS.attribute(optimizer, "_trainable_variables_indices")
    for values in slots_of(optimizer).values():
        for place, value in enumerate(values):
            if value is not None and place not in places:
                optimizer._untrack_variable(value)
        values[:] = [values[place] for place in places]
    keys = list(indices)
    indices.clear()
    indices.update({keys[place]: index for index, place in enumerate(places)})


def drop_slots(optimizer: Any) -> None:
    """Makes an optimizer drop the state of all variables, so that `build` makes new state."""
    keep_slots(optimizer, [])
    optimizer.built = False


def accumulators_of(optimizer: Any) -> Sequence[Any]:
    """Returns the variables in which an optimizer, or its inner optimizer, adds up gradients of passes."""
    both = (optimizer, getattr(optimizer, "inner_optimizer", None))
    # Only an optimizer that accumulates has them.
    return [variable for level in both for variable in getattr(level, "_accumulated_gradients", ())]


def is_autocast(variable: Any) -> bool:
    """Returns whether layers compute with a variable in their own dtype instead of the variable's."""
    return bool(_KERAS.attribute(variable, "_autocast"))


def discard_jax_state(model: Any) -> None:
    """Makes Keras on JAX forget the values of the last step, which a failed step has taken away from it."""
    if getattr(model, "_jax_state", None) is not None:
        model._jax_state = None


def keep_order_of(kind: type[Any]) -> None:
    """Makes `fit` read datasets of this class in their order, whatever its argument `shuffle`.

    A version of Keras in which that cannot be done may shuffle them.
    """
    adapter = _KERAS.optional("keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter")
    if adapter is None or getattr(adapter.__init__, "is_patched", False):
        return
    plain = adapter.__init__

    @functools.wraps(plain)
    def initialise(self: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(x, kind) and "shuffle" in kwargs:
            kwargs["shuffle"] = False
        plain(self, x, *args, **kwargs)

    initialise.is_patched = True  # type: ignore[attr-defined]
    adapter.__init__ = initialise


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of an object or a module inside."""
    with ExitStack() as stack:
        for name, value in attributes.items():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def is_evaluation() -> bool:
    """Returns whether Keras' `evaluate` or `predict` has called this, and not `fit` outside of validation."""
    return _running() in ("evaluate", "predict")


def is_training() -> bool:
    """Returns whether Keras' `fit` or `train_on_batch` has called this, outside of validation."""
    return _running() in ("fit", "train_on_batch")


def _running() -> str | None:
    """Returns the innermost of Keras' functions that take data and have called this; None: there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name, module = frame.f_code.co_name, str(frame.f_globals.get("__name__", ""))
        if name in _TAKING_DATA and module.startswith("keras."):
            return name
        frame = frame.f_back
    return None


def convert_to_sliceable(arrays: Any) -> Any:
    """Returns a structure of arrays in the form that `fit` takes rows from, with floats in Keras' dtype."""
    convert = _KERAS.symbol("keras.src.trainers.data_adapters.array_slicing.convert_to_sliceable")
    return convert(arrays, target_backend="numpy")


def samples_of(adapter: Any) -> Any:
    """Returns the arrays (x, y, sample weights) that the adapter of `fit` for arrays has been given."""
    return _KERAS.attribute(adapter, "_inputs")


def adapter_of_arrays() -> Any:
    """Returns the class that makes batches of arrays in `fit`."""
    return _KERAS.symbol("keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter")


def owner_of_adapters() -> Any:
    """Returns the module in which `fit` looks up `get_data_adapter`."""
    _KERAS.symbol("keras.src.trainers.data_adapters.get_data_adapter")
    return _KERAS.symbol("keras.src.trainers.data_adapters")


def random_numbers() -> Any:
    """Returns the module with the backend's random functions, in which all layers look them up."""
    return _KERAS.symbol("keras.src.backend.random")


def loss_reductions() -> Any:
    """Returns the module with `reduce_values` and `apply_mask`, in which losses look them up."""
    _KERAS.symbol("keras.src.losses.loss.apply_mask")
    return _KERAS.symbol("keras.src.losses.loss")


def build_for(model: Any, batch: Any) -> None:
    """Makes the variables of a compiled model, its losses, metrics and optimizer for batches like this."""
    _KERAS.attribute(model, "_symbolic_build")(data_batch=batch)


def metrics_of_losses(model: Any) -> Sequence[Any]:
    """Returns the metrics in which a compiled model of several outputs keeps each output's mean loss."""
    losses = _KERAS.attribute(model, "_compile_loss")
    return [metric for metric in losses.metrics if metric is not None] if losses is not None else []


def is_compiled(model: Any) -> bool:
    """Returns whether `compile` has been called."""
    return bool(getattr(model, "compiled", False))


def inputs_of(dataset: Any) -> Sequence[Any]:
    """Returns the datasets that a tf.data.Dataset reads."""
    return _tensorflow().attribute(dataset, "_inputs")()


def functions_of(dataset: Any) -> Sequence[Any]:
    """Returns the functions that a tf.data.Dataset calls."""
    return _tensorflow().attribute(dataset, "_functions")()


def _tensorflow() -> Framework:
    return Framework("tensorflow", sys.modules["tensorflow"].__version__, "2.15, 2.18 and 2.21")
