"""A transformation of optax that divides its state among the ranks (ZeRO, arXiv 1910.02054)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sirtaki.bindings.default_context import current
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.reduction import Adasum, Average, Sum
from sirtaki.common.training.combinations import refuse_combinations
from sirtaki.jax.ops.collectives import allgather, reducescatter
from sirtaki.jax.ops.compression import Compression, Compressor
from sirtaki.jax.training.consistency import BROADCAST, around, is_key
from sirtaki.numpy.consistency import EagerChecks

_PARTS = 2  # of the arrays of a trial
_SCALES = (0.0, 1.0, 1e6)  # of its gradients: decay alone, a usual step, and the limits of most clipping
_REFUSAL = (
    "this transformation looks at several elements together, or at the shapes of arrays (a norm, as in "
    "clipping, a factored moment, a mask for matrices, a step left out if any gradient is not finite), so "
    "shard cannot cut arrays in slices: leave that out of it, or use DistributedOptimizer"
)


def shard(
    optimizer: Any,
    name: str = "gradients",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
) -> Any:
    """Divides the state of a transformation of optax among the ranks, and averages the gradients.

    It takes the place of `DistributedOptimizer`: all ranks must call `update`, inside or outside jit, with
    their own gradients and with equal parameters. A reduce-scatter gives each rank its slices of the
    averages, the transformation computes the updates of these slices, and all ranks gather the updates. They
    are those of `DistributedOptimizer` up to rounding.

    Every array is cut in the order of its elements. The transformation therefore must treat each element by
    itself, as those of optax's SGD, Adam and similar optimizers do; `init` finds out by a trial. Norms, as
    for clipping, cannot be part of it.

    Args:
        optimizer: an optax.GradientTransformation.
        name: the prefix of the names of what is exchanged.
        compression: Compression.fp16 or Compression.bf16 to exchange gradients in 16 bits.
        op: Average or Sum.

    Returns:
        An optax.GradientTransformationExtraArgs. `full_state` makes its state whole, for a checkpoint.

    Raises:
        TypeError: `optimizer` is not a transformation of optax.
        ValueError: another op, or an elastic job, in which the state of a lost rank would exist nowhere else.
            From `init`: a transformation that looks at several elements together.
    """
    import optax  # imported late, because only this needs it

    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(f"shard takes a transformation of optax, such as optax.adam(1e-3), not {optimizer!r}")
    refuse_combinations(
        {
            "jax_shard": "shard",
            "adasum": op == Adasum,
            "extreme": op not in (Average, Sum, Adasum),
            "elastic": current().survivors is not None,
        }
    )
    inner = optax.with_extra_args_support(optimizer)
    checks = EagerChecks(f"check of {name}", BROADCAST)

    def init(params: Any) -> Any:
        _check_shapes(inner, params)
        _check_by_trial(inner, params)
        return inner.init(_slices(params))

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if current().size == 1:
            return inner.update(gradients, state, params, **extra)
        rows = jax.tree.map(_padded, gradients)
        with around(checks, global_process_set, gradients, {"params": params}):
            own = reducescatter(rows, name=f"{name} (slices)", compression=compression, op=op)
        updates, state = inner.update(own, state, _slices(params), **extra)
        gathered = allgather(updates, name=f"{name} (updates)")
        return jax.tree.map(_like, gathered, gradients), state

    return optax.GradientTransformationExtraArgs(init, update)


def full_state(optimizer: Any, state: Any, params: Any, name: str = "full_state") -> Any:
    """Returns the whole state of `shard(optimizer)`, as `optimizer` alone would have it. All ranks call it.

    Args:
        optimizer: the transformation that `shard` has been given.
        state: this rank's state.
        params: the parameters, of which only shapes and dtypes matter.
        name: the prefix of the names of what is gathered.
    """
    whole, parts = _shapes(optimizer, params)
    leaves, structure = jax.tree.flatten(state)
    divided = [index for index, (value, two) in enumerate(zip(whole, parts, strict=True)) if value != two]
    gathered = allgather([leaves[index] for index in divided], name=name)
    for index, elements in zip(divided, gathered, strict=True):
        leaves[index] = _like(elements, whole[index])
    return structure.unflatten(leaves)


def divided_state(optimizer: Any, state: Any, params: Any) -> Any:
    """Returns this rank's state of `shard(optimizer)`, given the whole state; inverts `full_state`."""
    whole, parts = _shapes(optimizer, params)
    leaves, structure = jax.tree.flatten(state)
    for index, (value, two) in enumerate(zip(whole, parts, strict=True)):
        if value != two:
            leaves[index] = _slice(leaves[index])
    return structure.unflatten(leaves)


def _shapes(optimizer: Any, params: Any) -> tuple[list[Any], list[Any]]:
    """Returns the shapes of the whole state, and of this rank's, without the parameters' elements."""
    whole = jax.eval_shape(optimizer.init, params)
    parts = jax.eval_shape(lambda given: optimizer.init(_slices(given)), params)
    return jax.tree.leaves(whole), jax.tree.leaves(parts)


def _length(count: int, ranks: int) -> int:
    """Returns the elements of a slice: never as many as the array has, so that their shapes differ."""
    length = -(-count // ranks)
    return length + (length == count)


def _padded(array: Any, ranks: int | None = None) -> Any:
    """Returns the elements of an array, with zeros after them, in slices of equal length."""
    ranks = ranks or current().size
    flat = jnp.ravel(array)
    return jnp.pad(flat, (0, ranks * _length(flat.size, ranks) - flat.size))


def _slice(array: Any) -> Any:
    context = current()
    return _padded(array).reshape(context.size, -1)[context.rank]


def _slices(tree: Any) -> Any:
    """Returns this rank's slice of each array; whole arrays in a world of 1 rank."""
    return tree if current().size == 1 else jax.tree.map(_slice, tree)


def _like(elements: Any, array: Any) -> Any:
    """Returns the first elements, with the shape of an array."""
    return elements[: int(np.prod(array.shape))].reshape(array.shape)


def _check_shapes(optimizer: Any, params: Any) -> None:
    """Raises ValueError unless each array of the state is that of a parameter, or is not divided.

    The trial's arrays may be too small for a moment to be factored.
    """
    ranks = max(current().size, _PARTS)
    sizes = {tuple(jnp.shape(leaf)): int(np.prod(jnp.shape(leaf))) for leaf in jax.tree.leaves(params)}
    slices = {shape: (_length(size, ranks),) for shape, size in sizes.items()}
    whole = jax.eval_shape(optimizer.init, params)
    cut = jax.eval_shape(
        lambda given: optimizer.init(
            jax.tree.map(lambda value: _padded(value, ranks).reshape(ranks, -1)[0], given)
        ),
        params,
    )
    if jax.tree.structure(whole) != jax.tree.structure(cut):
        raise ValueError(_REFUSAL)
    for item, part in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        if item.shape != part.shape and slices.get(item.shape) != part.shape:
            raise ValueError(_REFUSAL)


def _check_by_trial(optimizer: Any, params: Any) -> None:
    """Raises ValueError if updates of small arrays differ from the updates of their slices."""
    numbers = np.random.default_rng(0)
    leaves, structure = jax.tree.flatten(params)

    def drawn(scale: float = 1.0) -> list[Any]:
        return [numbers.normal(size=(3,) * jnp.ndim(leaf)).astype(np.float32) * scale for leaf in leaves]

    def with_infinity() -> list[Any]:
        """Returns gradients with an infinite element: some optimizers skip such a step."""
        arrays = drawn()
        for array in arrays[:1]:
            array.flat[0] = np.inf
        return arrays

    with jax.ensure_compile_time_eval():
        values, steps = drawn(), [*(drawn(scale) for scale in _SCALES), with_infinity()]
        whole, facts = _trained(optimizer, structure, values, steps)
        cut, facts_of_cut = zip(
            *(
                _trained(optimizer, structure, _part(values, at), [_part(step, at) for step in steps])
                for at in range(_PARTS)
            ),
            strict=True,
        )
    for value, *parts in zip(whole, *cut, strict=True):
        joined = np.concatenate(parts)[: value.size].reshape(value.shape)
        rounding = 1e-5 * np.abs(value[np.isfinite(value)]).max(initial=0.0)
        if not np.allclose(value, joined, rtol=1e-5, atol=rounding, equal_nan=True):
            raise ValueError(_REFUSAL)
    for value, *others in zip(facts, *facts_of_cut, strict=True):
        # An array that is not divided, such as a number of steps, has to be equal on all ranks.
        if any(value.shape == other.shape and not np.array_equal(value, other) for other in others):
            raise ValueError(_REFUSAL)


def _part(arrays: list[Any], at: int) -> list[Any]:
    return [_padded(array, _PARTS).reshape(_PARTS, -1)[at] for array in arrays]


def _trained(
    optimizer: Any, structure: Any, values: list[Any], steps: list[list[Any]]
) -> tuple[list[Any], list[Any]]:
    """Returns the updates of all steps, and the arrays of the state after them."""
    params = structure.unflatten([jnp.asarray(value) for value in values])
    state, found = optimizer.init(params), []
    for gradients in steps:
        given = structure.unflatten([jnp.asarray(gradient) for gradient in gradients])
        updates, state = optimizer.update(given, state, params)
        found += [np.asarray(leaf) for leaf in jax.tree.leaves(updates)]
    state = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(state)]
    return found, [np.asarray(leaf) for leaf in state]
