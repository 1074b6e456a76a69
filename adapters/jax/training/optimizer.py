"""Training with gradients averaged over all ranks, for optax and for any other user of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sirtaki.bindings import request as core
from sirtaki.bindings.context import current, find
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Adasum, Average, fixed_divisor, gradient_sum, reduction
from sirtaki.common.training.combinations import require_all_ranks
from sirtaki.jax.ops.collectives import combined
from sirtaki.jax.ops.compression import Compression, Compressor
from sirtaki.jax.ops.exchange_options import ExchangeOptions
from sirtaki.jax.training.consistency import BROADCAST, around, require_transformation
from sirtaki.jax.training.weighting import weighted
from sirtaki.numpy.consistency import EagerChecks

_GRADIENTS = ExchangeOptions(core.ALLREDUCE, ())
_OF_LOSS = ("value", "grad")  # arguments of update() by which transformations of optax follow the loss
_made: Counter[str] = Counter()  # optimizers of each name; compiled programs outlive a world


class AccumulatingState(NamedTuple):
    """The state of an optimizer that accumulates several backward passes for each step.

    Attributes:
        inner: the wrapped optimizer's state.
        total: the sum of this rank's gradients since the last step.
        passes: the number of these gradients.
    """

    inner: Any
    total: Any
    passes: Any


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Any,
    name: str | None = "gradients",
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes a transformation of optax update with gradients that are averaged over all ranks.

    All ranks must call `update`, inside or outside jit. All gradients of a step are exchanged as one
    operation. Subsequent transformations, such as clipping, see the averaged ones. `init` exchanges nothing:
    see `broadcast_parameters`.

    The loss, as `update(..., value=loss)` for `reduce_on_plateau`, and `grad` are combined as the gradients
    are. A line search, which calls `value_fn` with each rank's data, is refused.

    Outside jit, the second update compares parameters and state over the ranks, and raises
    ParametersDifferError if they differ; inside, `check_parameters` after a step does.

    Args:
        optimizer: an optax.GradientTransformation.
        name: the prefix of the gradients' names, which identify them on all ranks.
        compression: Compression.fp16 or Compression.bf16 to exchange gradients in 16 bits.
        backward_passes_per_step: number of updates that are accumulated on this rank before their sum is
            averaged over the ranks. The sum is not divided by this number. The updates in between are zeros.
        op: Average or Sum (also Min, Max, Product, Adasum).
        process_set: the ranks that take part.

    Returns:
        An optax.GradientTransformationExtraArgs.

    Raises:
        TypeError: `optimizer` is not a transformation of optax.
        ValueError: backward_passes_per_step is less than 1, or a process set in an elastic job.
        UnsupportedError: by `update`: it has been given a `value_fn`, and there are several ranks.

    Example:
        optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))
        params = hvd.broadcast_parameters(params, root_rank=0)
        state = optimizer.init(params)
        for inputs, targets in loader:
            updates, state = optimizer.update(jax.grad(loss_of)(params, inputs, targets), state, params)
            params = optax.apply_updates(params, updates)
    """
    import optax  # imported late, because only this needs it

    require_transformation(optimizer, "DistributedOptimizer takes")
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step is {backward_passes_per_step}, but it has to be 1 at least"
        )
    require_all_ranks(process_set)
    inner = optax.with_extra_args_support(optimizer)

    checks = EagerChecks(f"check of {name}", BROADCAST)

    is_tuned = process_set is global_process_set and op != Adasum
    steps = ExchangeOptions(core.ALLREDUCE, (), ends_step=True, stepper=_stepper(name) if is_tuned else None)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        with around(checks, process_set, gradients, {"params": params, "state": state}):
            reduced = _combined(gradients, name, compression, op, process_set, steps)
        followed = _combined(
            _of_loss(extra), f"{name or 'gradients'} (loss)", Compression.none, op, process_set
        )
        return inner.update(reduced, state, params, **(extra | followed))

    distributed = optax.GradientTransformationExtraArgs(inner.init, update)
    if backward_passes_per_step > 1:
        distributed = _accumulating(distributed, inner, backward_passes_per_step)

    def update_by_rows(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        _refuse_line_search(extra)
        extra |= weighted(_of_loss(extra), op, process_set)
        return distributed.update(weighted(gradients, op, process_set), state, params, **extra)

    return optax.GradientTransformationExtraArgs(distributed.init, update_by_rows)


def _of_loss(extra: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that have to be equal on all ranks, or each would take other steps."""
    return {name: extra[name] for name in _OF_LOSS if name in extra}


def _refuse_line_search(extra: dict[str, Any]) -> None:
    """Raises UnsupportedError if several ranks would search along different losses."""
    context = find()
    if extra.get("value_fn") is not None and (context is None or context.size > 1):
        raise UnsupportedError(
            "update() has been given a value_fn, which a line search evaluates with each rank's own data, so "
            "ranks would take different steps: choose a transformation without a line search, as "
            "optax.lbfgs(0.1, linesearch=None), and leave out value_fn"
        )


def _stepper(name: str | None) -> Stepper:
    """Returns the facts of a new optimizer for autotune, numbered among optimizers of the same name."""
    number = _made[name or "gradients"]
    _made[name or "gradients"] += 1
    return Stepper(f"{name or 'gradients'}.{number}")


def _combined(
    gradients: Any,
    name: str | None,
    compression: type[Compressor],
    op: int,
    process_set: ProcessSet,
    options: ExchangeOptions = _GRADIENTS,
) -> Any:
    """Returns the gradients, combined over the ranks; in an elastic job divided as the state says."""
    how = gradient_sum(reduction(op, None), fixed_divisor(current()))
    options = options._replace(name=name, op=how.op, prescale=how.prescale, postscale=how.postscale)
    return combined(gradients, options, compression, process_set)


def _accumulating(optimizer: Any, inner: Any, passes: int) -> Any:
    """Returns a transformation that updates once in `passes` passes; `inner` is the same without exchange."""

    def init(params: Any) -> AccumulatingState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AccumulatingState(optimizer.init(params), zeros, jnp.zeros((), jnp.int32))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        total = jax.tree.map(jnp.add, state.total, gradients)

        def step() -> tuple[Any, AccumulatingState]:
            updates, after = optimizer.update(total, state.inner, params, **extra)
            zeros = jax.tree.map(jnp.zeros_like, total)
            return updates, AccumulatingState(after, zeros, jnp.zeros((), jnp.int32))

        def wait() -> tuple[Any, AccumulatingState]:
            shapes = jax.eval_shape(lambda: inner.update(total, state.inner, params, **extra)[0])
            updates = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
            return updates, AccumulatingState(state.inner, total, state.passes + 1)

        is_last = state.passes == passes - 1
        if isinstance(is_last, jax.core.Tracer):
            return jax.lax.cond(is_last, step, wait)
        return step() if is_last else wait()  # outside of programs cond() would compile both in each call

    return type(optimizer)(init, update)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    name: str | None = "gradients",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Callable[..., Any]:
    """Works like jax.value_and_grad, with gradients averaged over all ranks, which must all call the result.

    The value, and any auxiliary output, stays this rank's own: `allreduce` it to report it.

    Args:
        fun, argnums, has_aux, options: as for jax.value_and_grad.
        name, compression, op, process_set: as for `DistributedOptimizer`.

    Raises:
        ValueError: a process set in an elastic job.

    Example:
        loss, gradients = jax.jit(hvd.value_and_grad(loss_of))(params, inputs, targets)
        loss = hvd.allreduce(loss)  # for the log
    """
    require_all_ranks(process_set)
    local = jax.value_and_grad(fun, argnums, has_aux, **options)

    @wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = local(*args, **kwargs)
        return value, _combined(weighted(gradients, op, process_set), name, compression, op, process_set)

    return reduced


def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """Works like jax.grad, with averaged gradients; the options are as for `value_and_grad`.

    Example:
        gradients = jax.jit(hvd.grad(loss_of))(params, inputs, targets)
        updates, state = optimizer.update(gradients, optimizer.init(params), params)
    """
    both = value_and_grad(fun, argnums, has_aux, **options)

    @wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return reduced
