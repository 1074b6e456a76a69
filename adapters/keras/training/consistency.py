"""Checks that ranks have the same model: during eager steps, after epochs and at the end of `fit`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import keras
import numpy as np

from sirtaki.bindings.context import current, is_elastic
from sirtaki.bindings.errors import MismatchError
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Max
from sirtaki.common.semantics import object_to
from sirtaki.keras._private import accumulators_of
from sirtaki.keras.training.gradient_reducer import GradientReduction, stable_name
from sirtaki.keras.training.sharded.optimizer import ShardedVariables, equal_variables
from sirtaki.numpy import consistency
from sirtaki.numpy.collectives import allreduce
from sirtaki.numpy.consistency import EagerChecks, Subject

_BROADCAST = (
    "hvd.broadcast_model(model, root_rank=0), or fit with hvd.callbacks.BroadcastGlobalVariablesCallback(0),"
)


def check_parameters(model: Any, process_set: ProcessSet = global_process_set) -> None:
    """Makes sure that all ranks of the set have the same model and optimizer. All of them must call it.

    It compares the trainable weights, and the variables and plain hyper-parameters of the optimizer; not the
    statistics of normalisation and the states of random number generators, which may differ. It sends 8
    bytes; more only if ranks differ.

    Args:
        model: a built model of Keras.
        process_set: the ranks that take part.

    Raises:
        ParametersDifferError: they differ. All ranks raise it, with the same text: which variables differ, on
            which ranks, and by how much.
        PeerLostError: a rank died.

    Example:
        hvd.broadcast_model(model, root_rank=0)
        # ... the first steps of the training
        hvd.check_parameters(model)
    """
    optimizer = getattr(model, "optimizer", None)
    consistency.check(_subject(optimizer, model.trainable_variables), _BROADCAST, process_set)


def check_before_local_steps(model: Any, outer_variables: Sequence[Any]) -> None:
    """Works like `check_parameters`, without the optimizer's variables, which are each rank's own.

    Compares the variables of an outer optimizer as well.
    """
    subject = _subject(model.optimizer, [*model.trainable_variables, *outer_variables], has_equal_state=False)
    consistency.check(subject, _BROADCAST, global_process_set)


class OptimizerChecks:
    """The checks of a distributed optimizer. It does not keep the optimizer alive."""

    def __init__(self, optimizer: Any, exchange: GradientReduction) -> None:
        self._optimizer, self._exchange = ref(optimizer), exchange
        self._first_step = _steps_of(optimizer)
        first = (
            1 if isinstance(optimizer, ShardedVariables) else 2
        )  # a divided one's step makes variables equal
        self._beside_steps = EagerChecks(f"check of {exchange.prefix}", _BROADCAST, first)
        self._after_steps = EagerChecks(f"check after {exchange.prefix}", _BROADCAST, first_check=1)

    def around(self, gradients: Sequence[Any], variables: Sequence[Any]) -> AbstractContextManager[None]:
        """Compares during the exchange inside the context; compiled steps are checked after them."""
        if not self._exchange.backend.is_eager(gradients):
            return nullcontext()
        process_set = self._exchange.how.process_set
        shared = self._shared(variables)
        own = {id(variable) for variable in shared}
        mine = [
            gradient for gradient, variable in zip(gradients, variables, strict=True) if id(variable) in own
        ]
        return self._beside_steps.around(
            process_set, self._compared(shared, variables), lambda: _arrays(mine)
        )

    def after_steps(self, variables: Sequence[Any]) -> None:
        """Compares now, outside of steps: all ranks of the optimizer's set must call it.

        Raises:
            ParametersDifferError: variables or learning rates differ.
            ValueError: the steps have exchanged nothing.
        """
        process_set = self._exchange.how.process_set
        members = process_set.members(current())
        if len(members) == 1 or current().rank not in members:
            return
        has_stepped = _steps_of(self._optimizer()) != self._first_step
        # In an elastic job a rank that joins has the steps of others.
        if has_stepped and not self._exchange.has_reduced and not is_elastic():
            text = (
                "steps were taken that exchanged nothing between the ranks: the model's training step had "
                "been compiled before DistributedOptimizer was called. Call "
                "hvd.DistributedOptimizer(optimizer) first, then model.compile(optimizer, ...)"
            )
            object_to(ValueError(text))
        shared = self._shared(variables)
        with self._after_steps.around(process_set, self._compared(shared, variables)):
            pass

    def _shared(self, variables: Sequence[Any]) -> list[Any]:
        own = self._exchange.local.numbers()
        return [variable for variable in variables if id(variable) not in own]

    def _compared(self, shared: Sequence[Any], variables: Sequence[Any]) -> Subject:
        """Returns the shared variables and the optimizer.

        If that has state of variables that are this rank's own, only the scale of its losses is compared.
        """
        optimizer = self._optimizer()
        if len(shared) == len(variables):
            return _subject(optimizer, shared)
        scale = getattr(optimizer, "dynamic_scale", None)  # of an optimizer that has been built
        return _subject(None, shared if scale is None else [*shared, scale])


def _steps_of(optimizer: Any) -> int:
    return int(keras.ops.convert_to_numpy(optimizer.iterations))


def _subject(optimizer: Any, variables: Sequence[Any], *, has_equal_state: bool = True) -> Subject:
    """Returns the variables of a model and of its optimizer, and the latter's hyper-parameters."""
    if optimizer is None:
        return Subject(lambda: _named(variables))

    def options() -> dict[str, Any]:
        return {name: value for name, value in optimizer.get_config().items() if name != "name"}

    def rate() -> tuple[float]:
        return (float(keras.ops.convert_to_numpy(optimizer.learning_rate)),)

    own = {id(variable) for variable in accumulators_of(optimizer)}  # sums of a step that is not complete
    equal = equal_variables(optimizer) if has_equal_state else []
    state = [variable for variable in equal if id(variable) not in own]
    return Subject(lambda: _named([*variables, *state]), rate, options)


def _named(variables: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for place, variable in enumerate(variables):
        yield f"{place}: {stable_name(variable)}", np.asarray(keras.ops.convert_to_numpy(variable))


def _arrays(gradients: Sequence[Any]) -> Iterator[Any]:
    for gradient in gradients:
        yield None if gradient is None else keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(gradient))


# ---- The end of a training: of all ranks at once, or of a single rank, for which all others would wait -


_ALONE = (
    "{peer} alone has ended its training, after {steps} steps, and other ranks go on: each of their steps "
    "would wait for it. A callback that looks at the loss or the metrics of its own rank ends the training "
    "there only: use hvd.callbacks.TerminateOnNaN() instead of the callback of Keras, and place "
    "hvd.callbacks.MetricAverageCallback() before EarlyStopping and its like"
)


def require_all_to_stop(optimizer: Any, exchange: GradientReduction) -> None:
    """Makes sure that all ranks end the training after this step. Those that do must call it.

    A rank that goes on exchanges the gradients of another step. The call therefore exchanges an array of
    another dtype under the name of the first of them, and so it either meets the calls of all other ranks or
    fails at once. Nothing is checked in an elastic job, whose ranks leave and join.

    Raises:
        ValueError: other ranks go on. Their step fails, and the world is aborted with this text.
    """
    context = current()
    process_set = exchange.how.process_set
    members = process_set.members(context)
    is_alone = len(members) == 1 or context.rank not in members
    if is_alone or exchange.first_name is None or context.survivors is not None:
        return
    steps = int(keras.ops.convert_to_numpy(optimizer.iterations))  # waits for the steps that are in flight
    try:
        allreduce(np.zeros(1, np.uint8), op=Max, name=exchange.first_name, process_set=process_set)
    except MismatchError:
        text = _ALONE.format(peer=context.topology.label(context.rank), steps=steps)
        context.abort(text)
        raise ValueError(text) from None
