"""A transformation of optax that divides its state among the ranks (ZeRO, arXiv 1910.02054)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sirtaki.bindings.context import current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.requests import Adasum, Average, Sum, fixed_divisor
from sirtaki.common.training.combinations import refuse_combinations
from sirtaki.common.training.groups import Place, place_in
from sirtaki.jax.ops.collectives import allgather, allreduce, reducescatter
from sirtaki.jax.ops.compression import Compression, Compressor
from sirtaki.jax.training.consistency import BROADCAST, around, is_key, require_transformation
from sirtaki.numpy.consistency import EagerChecks

_PARTS = 2  # of the arrays of a trial
_SCALES = (0.0, 1.0, 1e6)  # of its gradients: decay alone, a usual step, and the limits of most clipping
_REFUSAL = (
    "this transformation looks at several elements together, or at the shapes of arrays (a norm, as in "
    "clipping, a factored moment, a mask for matrices, a step left out if any gradient is not finite), so "
    "shard cannot cut arrays in slices: leave that out of it, or use DistributedOptimizer"
)


@partial(jax.tree_util.register_dataclass, data_fields=["inner"], meta_fields=["shapes", "place"])
@dataclass(frozen=True)
class ShardedState:
    """The state of a transformation that `shard` has made.

    Attributes:
        inner: the wrapped transformation's state: this rank's slices, and what is equal on all ranks.
        shapes: for each leaf of `inner` the shape of the whole array; None if it is not divided.
        place: the rank's among the ranks that divide the arrays. A single rank has whole arrays.
    """

    inner: Any
    shapes: tuple[tuple[int, ...] | None, ...]
    place: Place


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

    In an elastic job the state is part of a `JaxState`, which divides it anew when the ranks change.

    Every array is cut in the order of its elements. The transformation therefore must treat each element by
    itself, as those of optax's SGD, Adam and similar optimizers do; `init` finds out by a trial. Norms, as
    for clipping, cannot be part of it.

    Args:
        optimizer: an optax.GradientTransformation.
        name: the prefix of the names of what is exchanged.
        compression: Compression.fp16 or Compression.bf16 to exchange gradients in 16 bits.
        op: Average or Sum.

    Returns:
        An optax.GradientTransformationExtraArgs with a `ShardedState`, of which `inner` is the state of
        `optimizer`. `full_state` makes it whole, for a checkpoint.

    Raises:
        TypeError: `optimizer` is not a transformation of optax.
        ValueError: another op. From `init`: a transformation that looks at several elements together.
        UnsupportedError: from `update`: the state was divided among other ranks.

    Example:
        optimizer = hvd.shard(optax.adamw(1e-3))
        state = optimizer.init(params)  # state.inner: this rank's slices
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    """
    import optax  # imported late, because only this needs it

    require_transformation(optimizer, "shard takes")
    refuse_combinations(
        {
            "jax_shard": "shard",
            "adasum": op == Adasum,
            "extreme": op not in (Average, Sum, Adasum),
        }
    )
    inner = optax.with_extra_args_support(optimizer)
    checks = EagerChecks(f"check of {name}", BROADCAST)

    def init(params: Any) -> ShardedState:
        shapes = _check_shapes(inner, params)
        _check_by_trial(inner, params)
        return ShardedState(inner.init(_slices(params)), shapes, place_in(current()))

    def update(
        gradients: Any, state: ShardedState, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        _check_place(state)
        divisor = fixed_divisor(current()) if op == Average else None
        if state.place.ranks == 1:
            if current().is_provisional:  # refused outside of programs, and when programs run
                gradients = allreduce(gradients, name=name, op=op)
            own = gradients if divisor is None else jax.tree.map(lambda part: part / divisor, gradients)
            updates, changed = inner.update(own, state.inner, params, **extra)
            return updates, ShardedState(changed, state.shapes, state.place)
        rows = jax.tree.map(partial(_padded, ranks=state.place.ranks), gradients)
        with around(checks, global_process_set, gradients, {"params": params}):
            own = reducescatter(
                rows,
                name=f"{name} (slices)",
                compression=compression,
                op=op if divisor is None else Sum,
                prescale_factor=1.0 / (divisor or 1),
            )
        updates, changed = inner.update(own, state.inner, _slices(params), **extra)
        gathered = allgather(updates, name=f"{name} (updates)")
        whole = jax.tree.map(_like, gathered, gradients)
        return whole, ShardedState(changed, state.shapes, state.place)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_place(state: Any) -> None:
    """Raises UnsupportedError unless the state belongs to this rank and to the present number of ranks."""
    if not isinstance(state, ShardedState):
        raise UnsupportedError(
            f"shard needs the state that its init() has made, and not a {type(state).__name__}: load whole "
            "states with hvd.divided_state"
        )
    place = place_in(current())
    if state.place != place:
        raise UnsupportedError(
            f"this state has the slices of rank {state.place.position} of {state.place.ranks}, and this is "
            f"rank {place.position} of {place.ranks}: make it part of the elastic state, "
            "hvd.elastic.JaxState(optimizer=state), or divide a whole state with hvd.divided_state"
        )


def full_state(optimizer: Any, state: ShardedState, params: Any, name: str = "full_state") -> Any:
    """Returns the whole state of `shard(optimizer)`, as `optimizer` alone would have it. All ranks call it.

    Args:
        optimizer: the transformation that `shard` has been given.
        state: this rank's state.
        params: the parameters, of which only shapes and dtypes matter.
        name: the prefix of the names of what is gathered.

    Example:
        optimizer = optax.adamw(1e-3)
        state = hvd.shard(optimizer).init(params)
        whole = hvd.full_state(optimizer, state, params)  # on all ranks, for a checkpoint
    """
    _check_place(state)
    leaves, structure = jax.tree.flatten(state.inner)
    if state.place.ranks > 1:
        divided = [index for index, shape in enumerate(state.shapes) if shape is not None]
        gathered = allgather([leaves[index] for index in divided], name=name)
        whole = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
        for index, elements in zip(divided, gathered, strict=True):
            leaves[index] = _like(elements, whole[index])
    return structure.unflatten(leaves)


def divided_state(optimizer: Any, state: Any, params: Any) -> ShardedState:
    """Returns this rank's state of `shard(optimizer)`, given the whole state; inverts `full_state`.

    Example:
        optimizer = optax.adamw(1e-3)
        whole = optimizer.init(params)  # or from a checkpoint
        state = hvd.divided_state(optimizer, whole, params)
        updates, state = hvd.shard(optimizer).update(gradients, state, params)
    """
    shapes = _check_shapes(optimizer, params)
    leaves, structure = jax.tree.flatten(state)
    own = [leaf if shape is None else _slices(leaf) for leaf, shape in zip(leaves, shapes, strict=True)]
    return ShardedState(structure.unflatten(own), shapes, place_in(current()))


def slice_shape(shape: tuple[int, ...], place: Place) -> tuple[int, ...]:
    """Returns the shape of a rank's slice of an array; a single rank has the whole array."""
    return shape if place.ranks == 1 else (_length(math.prod(shape), place.ranks),)


def slice_of(elements: np.ndarray, shape: tuple[int, ...], place: Place) -> np.ndarray:
    """Returns a rank's slice of an array of this shape, given all elements, with zeros after them."""
    own = np.zeros(slice_shape(shape, place), elements.dtype)
    begin = place.position * own.size
    part = elements[begin : min(begin + own.size, math.prod(shape))]
    own.reshape(-1)[: part.size] = part
    return own


def _length(count: int, ranks: int) -> int:
    """Returns the elements of a slice: never as many as the array has, so that their shapes differ."""
    length = -(-count // ranks)
    return length + (length == count)


def _padded(array: Any, ranks: int) -> Any:
    """Returns the elements of an array, with zeros after them, in slices of equal length."""
    flat = jnp.ravel(array)
    return jnp.pad(flat, (0, ranks * _length(flat.size, ranks) - flat.size))


def _slices(tree: Any) -> Any:
    """Returns this rank's slice of each array; whole arrays in a world of 1 rank."""
    place = place_in(current())
    if place.ranks == 1:
        return tree
    return jax.tree.map(
        lambda array: _padded(array, place.ranks).reshape(place.ranks, -1)[place.position], tree
    )


def _like(elements: Any, array: Any) -> Any:
    """Returns the first elements, with the shape of an array."""
    return elements[: int(np.prod(array.shape))].reshape(array.shape)


def _check_shapes(optimizer: Any, params: Any) -> tuple[tuple[int, ...] | None, ...]:
    """Returns the shape of each array of the state that is divided; None for arrays that are whole.

    The trial's arrays may be too small for a moment to be factored.

    Raises:
        ValueError: an array is neither that of a parameter, nor equal on all ranks.
    """
    ranks = max(place_in(current()).ranks, _PARTS)
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
    pairs = list(zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True))
    for item, part in pairs:
        if item.shape != part.shape and slices.get(item.shape) != part.shape:
            raise ValueError(_REFUSAL)
    return tuple(None if item.shape == part.shape else tuple(item.shape) for item, part in pairs)


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
