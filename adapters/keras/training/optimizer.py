"""DistributedOptimizer: any optimizer of Keras 3, with equal steps on all ranks."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from traceback import walk_tb
from types import FrameType
from typing import Any

import keras

from sirtaki.bindings.context import add_survivor, current, find, is_elastic
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Average
from sirtaki.common.training.groups import GroupRules, Groups, check_groups
from sirtaki.keras import backends
from sirtaki.keras._private import (
    is_autocast,
    is_training,
    layers_of,
    loss_reductions,
    replaced,
    trainable_variables_of,
)
from sirtaki.keras.compression import Compression, Compressor
from sirtaki.keras.training.consistency import OptimizerChecks, require_all_to_stop
from sirtaki.keras.training.gradient_reducer import (
    KIND,
    GradientReduction,
    LocalVariables,
    combination,
    is_stored,
)
from sirtaki.keras.training.sharded.optimizer import ShardedVariables, check_shard, refuse_loss_scaling


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
        variables = trainable_variables_of(self)
        is_wrong = len(grads) != len(variables)  # which is for Keras to report
        if exchange.is_done or self._postpones or is_wrong:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)
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


# ---- The functions that make optimizers distributed ----------------------------------------------------

_GROUP_RULES = GroupRules("variable", ", but it has to be 0 (all together) or the number of groups")


def DistributedOptimizer(  # noqa: N802  # Horovod's name; the result is a class made for the occasion
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    *,  # horovod.keras and horovod.tensorflow.keras differ in the order of the rest
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    shard: str | None = None,
) -> Any:
    """Makes an optimizer step with gradients that are averaged over all ranks. All ranks must call it.

    Gradients are reduced when they are applied, by `model.fit`, `train_on_batch` or a custom loop
    (`optimizer.apply`, `apply_gradients`), before Keras clips them or checks whether they are finite: the
    ranks together do what one process with all their batches would. The same optimizer is returned: it
    remains an instance of its own class, with its state, and it is saved as the plain one. In a world of one
    nothing is exchanged. In an elastic job it continues when the ranks change.

    Args:
        optimizer: any optimizer of Keras 3, also a LossScaleOptimizer.
        name: the prefix of the names of its gradients, the same on all ranks.
        device_dense, device_sparse: accepted and ignored: tensors are exchanged where they are.
        compression: Compression.fp16 or Compression.bf16 to exchange gradients in 16 bits.
        sparse_as_dense: whether sparse gradients (TensorFlow's IndexedSlices) are exchanged as dense ones.
        gradient_predivide_factor: divides gradients before they are averaged, and multiplies them afterwards:
            for 16-bit gradients that would overflow. Needs op=Average.
        op: Average or Sum.
        backward_passes_per_step: number of passes that are accumulated on this rank, as with Keras'
            `gradient_accumulation_steps`, before the ranks exchange their sum and a step is taken.
        average_aggregated_gradients: whether to use the mean of those passes instead of their sum.
        num_groups: the older name of groups=N.
        groups: gradients that complete together: a number of groups of equal length, or lists of variables;
            other gradients complete by themselves. Without it, all of a step complete together.
        process_set: the ranks that take part; on other ranks the optimizer stays plain.
        scale_local_gradients: whether gradients that stay on this rank (see `register_local_var`) are divided
            by the number of ranks.
        shard: "state" to divide the optimizer's variables among the ranks: each keeps those of its part of
            the model's variables, updates that part, and sends it to the others. Parameters have the same
            bits as without. Save with `save_model`, or collect the state with `full_state_dict`.

    Returns:
        The optimizer, which now also has `register_local_var(variable)`.

    Raises:
        ValueError: wrong arguments, an object that is not an optimizer of Keras 3, or one that is already
            distributed; a process set in an elastic job; `shard` with an optimizer, an argument or a job that
            it does not go with.
        UnsupportedError: Keras runs on a backend other than TensorFlow, torch or JAX.
        NotInitializedError: init() has not been called.

    Example:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
        model.compile(optimizer, loss="mse")
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(hvd.shard_arrays(inputs, targets), callbacks=[start])
    """
    _check_optimizer(optimizer)
    combined = combination(op, gradient_predivide_factor, process_set)
    groups = num_groups if groups is None else groups
    check_groups(groups, _GROUP_RULES)
    check_shard(shard, optimizer, backward_passes_per_step, process_set)
    number = current().next_number(KIND.format(process_set.number(current())))
    exchange = GradientReduction(
        backends.find(),
        name or (f"gradient.{number}" if number else "gradient"),
        combined,
        compression,
        groups,
        sparse_as_dense,
        _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients),
        LocalVariables(scale_local_gradients),
        number,
    )
    add_survivor(exchange)
    patch_loss_scale_optimizer()
    patch_losses()
    is_sharded = shard is not None and (current().size > 1 or is_elastic())
    return make_distributed(optimizer, exchange, is_sharded)


def PartialDistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Any, *args: Any, local_layers: Any | Iterable[Any] | None = None, **kwargs: Any
) -> Any:
    """Works like `DistributedOptimizer`, with local layers: their gradients stay on each rank.

    Args:
        optimizer, args, kwargs: as for `DistributedOptimizer`.
        local_layers: a layer or several; their variables need not exist yet.

    Raises:
        ValueError: an object that is not a layer, and as for `DistributedOptimizer`.

    Example:
        head = keras.layers.Dense(2)  # each rank trains its own
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), head])
        model.compile(hvd.PartialDistributedOptimizer(optimizer, local_layers=head), loss="mse")
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=head.variables)
        model.fit(hvd.shard_arrays(inputs, targets), callbacks=[start])
    """
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, list | tuple | set) else [layers]
    wrong = next((layer for layer in layers if not isinstance(layer, keras.layers.Layer)), None)
    if wrong is not None:
        raise ValueError(
            f"local_layers has to hold layers of Keras, and {type(wrong).__name__} is none; for single "
            "variables use register_local_var()"
        )
    distributed = DistributedOptimizer(optimizer, *args, **kwargs)
    distributed._exchange.local.layers += layers
    return distributed


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, Distributed):
        raise ValueError("this optimizer is distributed already: call DistributedOptimizer once for it")
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return
    kind = type(optimizer)
    if any(base.__module__.startswith(("tf_keras.", "tensorflow.")) for base in kind.__mro__):
        raise ValueError(
            f"{kind.__name__} is an optimizer of Keras 2 ({kind.__module__}), and sirtaki.keras serves Keras "
            f"3 only: use keras.optimizers, and unset TF_USE_LEGACY_KERAS"
        )
    raise ValueError(
        "the first argument has to be an optimizer of Keras, such as keras.optimizers.Adam(), "
        f"not {_shown(optimizer)}"
    )


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else f"a {type(value).__name__}"


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Enables gradient accumulation over `passes` steps; returns the factor from Keras' mean to a sum."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}, but a step needs one pass at least")
    if passes == 1:
        return 1.0
    stepping = getattr(optimizer, "inner_optimizer", optimizer)
    is_loaded = stepping.built and stepping.gradient_accumulation_steps == passes
    if stepping.gradient_accumulation_steps and not is_loaded:
        raise ValueError(
            "give either backward_passes_per_step or the optimizer's gradient_accumulation_steps, not both: "
            "they are two names for one thing"
        )
    if stepping.built and not is_loaded:
        raise ValueError(
            "backward_passes_per_step needs an optimizer that has not been used yet: make the optimizer with "
            f"gradient_accumulation_steps={passes} instead"
        )
    stepping.gradient_accumulation_steps = passes
    return 1.0 if average else float(passes)


# Loss scaling: all ranks must agree whether gradients are finite, and so whether a step is taken.


def patch_loss_scale_optimizer() -> None:
    """Makes Keras' LossScaleOptimizer support distributed optimizers. A second call does nothing.

    `model.compile` wraps one around any optimizer of a model in mixed_float16. It checks this rank's
    gradients, and skips the step of the inner optimizer if they are not finite: other ranks would wait for
    it. So the outer optimizer has to reduce them first.
    """
    kind: Any = keras.optimizers.LossScaleOptimizer
    plain = kind.__init__
    if getattr(plain, "is_patched", False):
        return

    @functools.wraps(plain)
    def initialise(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(inner_optimizer, ShardedVariables):
            refuse_loss_scaling()
        plain(self, inner_optimizer, *args, **kwargs)
        if isinstance(inner_optimizer, Distributed) and not isinstance(self, Distributed):
            make_distributed(self, inner_optimizer._exchange)

    initialise.is_patched = True  # type: ignore[attr-defined]
    kind.__init__ = initialise


# Losses of training steps that count as in one process: sums, and means over the weights of all ranks.


def patch_losses() -> None:
    """Makes the losses that models are compiled with fit distributed optimizers. A second call does nothing.

    Averages of gradients are those of a mean over equally many rows. Keras also has losses that are sums over
    rows, and means over weights or over what a mask leaves, of which ranks have different numbers.
    """
    owner: Any = next(kind for kind in keras.Model.__mro__ if "compute_loss" in vars(kind))
    plain = owner.compute_loss
    if getattr(plain, "is_patched", False):
        return

    @functools.wraps(plain)
    def compute_loss(self: Any, *args: Any, **options: Any) -> Any:
        optimizer = distributed_of(self.optimizer)
        # A validation may be made by one rank alone.
        if optimizer is None or not options.get("training", True) or not is_training():
            return plain(self, *args, **options)
        exchange = optimizer._exchange
        if exchange.halves is None:
            exchange.halves = _in_float16(self)
        if exchange.is_split or not exchange.ranks:
            return plain(self, *args, **options)
        with _counting_as_one(exchange):
            return plain(self, *args, **options)

    if keras.backend.backend() == "torch":  # torch.compile looks at no frames
        compute_loss = sys.modules["torch"].compiler.disable(compute_loss)
    compute_loss.is_patched = True  # type: ignore[attr-defined]
    owner.compute_loss = compute_loss


def _in_float16(model: Any) -> set[int]:
    """Returns the `id()` of the variables with gradients that are computed in float16."""
    layers = {
        id(variable): layer for layer in layers_of(model) for variable in layer.trainable_variables
    }  # innermost
    return {
        id(variable)
        for variable in model.trainable_variables
        if id(variable) in layers
        and layers[id(variable)].compute_dtype == "float16"
        and is_autocast(variable)
    }


def _counting_as_one(exchange: GradientReduction) -> AbstractContextManager[None]:
    """Scales losses inside so that their average over the ranks is the loss of a single process.

    A loss with a divisor that depends on the rank is divided by the divisor's average instead: a single
    number is reduced for each such loss, before the gradients.
    """
    module, numbers = loss_reductions(), itertools.count()
    masked, reduced = module.apply_mask, module.reduce_values

    def share(weight: Any) -> Any:
        """Returns a rank's sum of weights, divided by the average over the ranks."""
        mean = exchange.mean(f"weights.{next(numbers)}", weight)
        return keras.ops.divide_no_nan(weight, mean)

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = masked(sample_weight, mask, dtype=dtype, reduction=reduction)
        if mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        return weights * share(keras.ops.sum(keras.ops.cast(mask, weights.dtype)))

    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        loss = reduced(values, sample_weight, reduction)
        if not len(values.shape) or len(loss.shape):  # Keras has not reduced it
            return loss
        if reduction == "sum":
            return loss / exchange.divided(keras.ops.ones((), loss.dtype))
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            return loss * share(keras.ops.cast(keras.ops.sum(sample_weight), loss.dtype))
        return loss

    return replaced(module, apply_mask=apply_mask, reduce_values=reduce_values)
