"""Adds abilities to Keras optimizers that stay instances of their class."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from traceback import walk_tb
from types import FrameType
from typing import Any

import keras

from sirtaki.bindings.context import find
from sirtaki.keras._private import trainable_variables_of
from sirtaki.keras.training.consistency import OptimizerChecks, require_all_to_stop
from sirtaki.keras.training.gradient_reducer import GradientReduction, is_stored
from sirtaki.keras.training.sharded.optimizer import ShardedVariables


class Distributed(keras.optimizers.Optimizer):
    """The abilities of a distributed optimizer besides its own class.

    Its gradients are reduced on entry, before any other processing; accumulated gradients after Keras has
    added them up and before it clips.
    """

    _exchange: GradientReduction
    _checks: OptimizerChecks
    _plain: type[Any]

    def apply(self, grads: Sequence[Any], trainable_variables: Iterable[Any] | None = None) -> Any:
        """Works like the optimizer's own, with gradients reduced over all ranks, which must all call it."""
        exchange = self._exchange
        given = None if trainable_variables is None else list(trainable_variables)
        variables = trainable_variables_of(self) if given is None else given
        gradients = list(grads)
        if exchange.is_done or len(gradients) != len(variables):  # the latter is for Keras to report
            return super().apply(gradients, given)
        if exchange.record(gradients):
            return None
        gradients = exchange.weighted(gradients)
        if self._postpones:
            # Keras stores values that are no gradients in each pass, before it adds up the others.
            gradients = exchange.reduce_stored(gradients, variables)
            pairs = zip(gradients, variables, strict=True)
            added = [
                variable for gradient, variable in pairs if gradient is not None and not is_stored(variable)
            ]
            with exchange.postponed(added):
                return super().apply(gradients, given)
        # The parts of one batch may have equal gradients, which the checks take for equal data.
        with nullcontext() if exchange.counts_rows else self._checks.around(gradients, variables):
            gradients = exchange.reduce(gradients, variables, self._scales_losses)
        with exchange.done():
            return super().apply(gradients, given)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """Works like `apply`, for backends that pass variables as arguments."""
        exchange = self._exchange
        if exchange.record(grads):  # as results: what a compiled step records exists inside it only
            return trainable_variables, list(grads)
        if exchange.is_done or self._postpones:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)
        variables = trainable_variables_of(self)
        gradients = exchange.reduce(exchange.weighted(grads), variables, self._scales_losses)
        with exchange.done():
            return super().stateless_apply(optimizer_variables, gradients, trainable_variables)

    def scale_loss(self, loss: Any) -> Any:
        """Works like the optimizer's own, for the loss of a single rank of several."""
        exchange = self._exchange
        if exchange.ranks and len(
            loss.shape
        ):  # not reduced: TensorFlow adds up the gradients of its elements
            loss = loss / exchange.divided(keras.ops.ones((), loss.dtype))
        return super().scale_loss(exchange.divide_loss(loss) if self._scales_losses else loss)

    @property
    def _postpones(self) -> bool:
        """Returns whether gradients are reduced once accumulated.

        Those of a part of a batch are reduced before: the accumulated ones are then always equal on all
        ranks, as a script expects that may save the optimizer, or train on in another call of `fit`.
        """
        return bool(self.gradient_accumulation_steps) and not self._exchange.counts_rows

    @property
    def _scales_losses(self) -> bool:
        """Returns whether Keras skips steps with gradients that are not finite, and adapts the loss scale."""
        return isinstance(self, keras.optimizers.LossScaleOptimizer)

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        return super()._clip_gradients(self._exchange.reduce_postponed(grads))

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Works like the optimizer's own, which `fit` calls at its end; checks that the variables are equal
        then. When a rank leaves its world in an elastic job, the training goes on, and nothing is final.
        Nothing is checked if `fit` ends by an exception, which is then the news, not what other ranks do.

        Raises:
            ParametersDifferError: they are not.
            ValueError: the steps have exchanged nothing, or other ranks go on.
        """
        if _is_leaving():
            return
        super().finalize_variable_values(var_list)
        if _is_fit_failing():
            return
        require_all_to_stop(self, self._exchange)
        self._checks.after_steps(var_list)

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradients of a variable on this rank; all ranks must call it."""
        self._exchange.local.variables.append(var)

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Returns a plain optimizer of this configuration: the distribution is not part of it."""
        return cls._plain.from_config(config, *args, **kwargs)


def _is_leaving() -> bool:
    """Returns whether `fit` ends by an exception in an elastic job, for example because the ranks change.

    On JAX it ends its optimizer even then.
    """
    context = find()
    if context is None or context.survivors is None:
        return False
    return context.failure is not None or sys.exc_info()[1] is not None


def _is_fit_failing() -> bool:
    """Returns whether an exception is leaving the `fit` that calls: on JAX it ends its optimizer even then.

    Another exception may be in treatment, where a program trains in an `except` block.
    """
    error = sys.exc_info()[1]
    if error is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "fit":
        frame = frame.f_back
    return frame is not None and any(entered is frame for entered, _ in walk_tb(error.__traceback__))


def make_distributed(optimizer: Any, exchange: GradientReduction, is_sharded: bool = False) -> Any:
    """Makes an optimizer distributed, in place, and returns it.

    Its class keeps its name, and Keras saves it as the original class: the files can be loaded without
    sirtaki. If it is sharded, its state is divided among the ranks.
    """
    kind = type(optimizer)
    name = keras.saving.get_registered_name(kind)
    public = getattr(keras.optimizers, kind.__name__, None)
    module = "keras.optimizers" if public in kind.__mro__ else kind.__module__
    members = {"__doc__": kind.__doc__, "__module__": module, "_plain": kind}
    # Keras and TensorFlow inspect every attribute that is set on an optimizer; this one must stay hidden.
    abilities = (Distributed, ShardedVariables) if is_sharded else (Distributed,)
    object.__setattr__(optimizer, "__class__", type(name, (*abilities, kind), members))
    object.__setattr__(optimizer, "_exchange", exchange)
    object.__setattr__(optimizer, "_checks", OptimizerChecks(optimizer, exchange))
    if is_sharded:
        optimizer.begin_division()
    return optimizer


def distributed_of(optimizer: Any) -> Distributed | None:
    """Returns an optimizer if it is distributed; Keras may have wrapped it to scale losses."""
    for level in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(level, Distributed):
            return level
    return None
