"""Transformations of optax with which each rank takes steps of its own: local SGD and DiLoCo."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from sirtaki.bindings.context import current
from sirtaki.common.ops.requests import Min, Sum
from sirtaki.jax.ops.collectives import allreduce, broadcast
from sirtaki.jax.ops.compression import Compression, Compressor
from sirtaki.jax.ops.programs import size
from sirtaki.jax.training.consistency import is_traced, require_transformation

_TAKER = "local steps take"


class LocalState(NamedTuple):
    """The state of a transformation with local steps.

    Attributes:
        inner: this rank's state of the wrapped transformation.
        shared: what is equal on all ranks: with DiLoCo, the parameters after the last synchronization and the
            outer transformation's state.
        steps: this rank's steps since the last synchronization, an int32.
    """

    inner: Any
    shared: Any
    steps: Any


def local_sgd(optimizer: Any, every: int, name: str = "local_sgd") -> Any:
    """Makes each rank step with its own gradients, and averages the parameters in every `every`-th step.

    All ranks must call `update`, inside or outside jit, with equal parameters before the first step: see
    `broadcast_parameters`; `check_parameters` compares them, which a program cannot. It has to be the
    outermost transformation: what it wraps, such as a chain, is this rank's own, with its state. The update
    of a synchronization leads from this rank's parameters to the average, up to rounding; for parameters of
    16 bits, updates have 32. (Stich, arXiv 1805.09767.)

    At the end of the data all ranks call `params, state = optimizer.synchronize(params, state)`, outside jit.
    It includes the last incomplete window, and makes the parameters equal bit by bit. A rank with fewer steps
    waits there, and takes part in the others' averages with the weight of its steps since the last one.

    In an elastic job all ranks call it before each commit, too. The state of the wrapped transformation is
    the rank's own; a rank that joins begins with rank 0's.

    Args:
        optimizer: an optax.GradientTransformation.
        every: steps between two averages, 1 or more.
        name: identifies the exchange on all ranks; another one for each transformation in use.

    Returns:
        An optax.GradientTransformationExtraArgs, which also has `synchronize`.

    Raises:
        TypeError: `optimizer` is not a transformation of optax.
        ValueError: wrong arguments. From `update`: it has not been given the parameters.

    Example:
        optimizer = hvd.local_sgd(optax.sgd(0.1), every=10)
        state = optimizer.init(params)
        for inputs, targets in loader:
            updates, state = optimizer.update(jax.grad(loss_of)(params, inputs, targets), state, params)
            params = optax.apply_updates(params, updates)
        params, state = optimizer.synchronize(params, state)
    """
    return _LocalSteps(optimizer, every, _Averaging(), _Exchange(name)).transformation()


def diloco(
    optimizer: Any,
    outer: Any = None,
    every: int = 500,
    name: str = "diloco",
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Makes each rank step with its own gradients, and an outer transformation step with the average changes.

    It works like `local_sgd`, except that in every `every`-th step the differences between a common copy of
    the parameters, which `init` makes, and the ranks' parameters are averaged. The outer transformation takes
    them as the gradient of the copy, which becomes the parameters of all ranks. (DiLoCo, arXiv 2311.08105.)

    Args:
        optimizer: an optax.GradientTransformation for the steps of each rank.
        outer: another one, of the copy; None: SGD with a learning rate of 0.7 and Nesterov's momentum of 0.9,
            as in the paper. With optax.sgd(1.0) the parameters are averaged.
        every: steps between two averages, 1 or more.
        name: identifies the exchange on all ranks; another one for each transformation in use.
        compression: Compression.fp16 or Compression.bf16 to exchange the differences in 16 bits.

    Returns:
        An optax.GradientTransformationExtraArgs, which also has `synchronize`.

    Raises:
        TypeError: `optimizer` or `outer` is not a transformation of optax.
        ValueError: wrong arguments. From `update`: it has not been given the parameters.

    Example:
        optimizer = hvd.diloco(optax.adamw(1e-3), every=100)
        state = optimizer.init(params)
        for inputs, targets in loader:
            updates, state = optimizer.update(jax.grad(loss_of)(params, inputs, targets), state, params)
            params = optax.apply_updates(params, updates)
        params, state = optimizer.synchronize(params, state)
    """
    import optax  # imported late, because only these need it

    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    require_transformation(outer, _TAKER)
    return _LocalSteps(optimizer, every, _OuterStep(outer), _Exchange(name, compression)).transformation()


class _Average(NamedTuple):
    """The result of an exchange, equal on all ranks.

    Attributes:
        tree: the averages, of at least 32 bits.
        weight: the sum of the ranks' weights.
        all_have_ended: whether no rank has steps left.
    """

    tree: Any
    weight: Any
    all_have_ended: Any


class _Exchange:
    """The weighted average of a tree over all ranks; their numbers of steps differ at their end only."""

    def __init__(self, name: str, compression: type[Compressor] = Compression.none) -> None:
        self._name, self._compression = name, compression

    def average(self, tree: Any, steps: Any, every: int, has_ended: bool) -> _Average:
        """Exchanges. Inside programs and outside, the operations have the same names."""
        # The third number counts the ranks that take part: those that have joined contribute zeros.
        header = jnp.stack([steps, jnp.asarray(has_ended, jnp.int32), jnp.ones((), jnp.int32)])
        # Divided by the number of ranks, no sum of weighted values leaves the range of 16 bits.
        divisors = jax.tree.map(lambda value: size() if value.dtype.itemsize == 2 else 1, tree)
        weighted = jax.tree.map(
            lambda value, divisor: _times(value, steps, every * divisor).astype(value.dtype), tree, divisors
        )
        sent = {"header": header, "values": weighted}
        found = allreduce(sent, name=self._name, compression=self._compression, op=Sum)
        total, ended, present = found["header"]
        averages = jax.tree.map(
            lambda value, divisor: _times(value, every * divisor, jnp.maximum(total, 1)),
            found["values"],
            divisors,
        )
        return _Average(averages, total, ended == present)

    def equalized(self, tree: Any) -> Any:
        """Returns the arrays of the first rank that has not joined.

        Others may differ by rounding, if programs are compiled differently.
        """
        rank = jnp.asarray(current().rank, jnp.int32)
        first = allreduce(rank, op=Min, name=f"{self._name} (first rank)")
        return broadcast(tree, int(first), name=f"{self._name} (equal)")


class _Rule(Protocol):
    """A rule by which the average of the ranks changes the parameters."""

    def init(self, params: Any) -> Any:
        """Returns what the rule remembers, equal on all ranks."""

    def contribution(self, local: Any, shared: Any) -> Any:
        """Returns what is averaged, for a rank's parameters."""

    def apply(self, average: Any, local: Any, shared: Any) -> tuple[Any, Any]:
        """Returns the new parameters, and what the rule remembers."""

    def latest(self, local: Any, shared: Any) -> Any:
        """Returns the parameters of the last synchronization, if no rank has taken a step since."""


class _Averaging:
    """Replaces parameters by their average."""

    def init(self, params: Any) -> Any:
        return ()

    def contribution(self, local: Any, shared: Any) -> Any:
        return local

    def apply(self, average: Any, local: Any, shared: Any) -> tuple[Any, Any]:
        return _like(average, local), ()

    def latest(self, local: Any, shared: Any) -> Any:
        return local


class _OuterStep:
    """Moves a common copy of the parameters by a transformation, against the average of the changes."""

    def __init__(self, outer: Any) -> None:
        import optax

        self._outer = optax.with_extra_args_support(outer)
        self._moved = optax.apply_updates

    def init(self, params: Any) -> Any:
        return jax.tree.map(jnp.copy, params), self._outer.init(params)

    def contribution(self, local: Any, shared: Any) -> Any:
        return jax.tree.map(lambda value, own: value - own, shared[0], local)

    def apply(self, average: Any, local: Any, shared: Any) -> tuple[Any, Any]:
        whole, state = shared
        updates, state = self._outer.update(_like(average, whole), state, whole)
        whole = _like(self._moved(whole, updates), whole)
        return whole, (whole, state)

    def latest(self, local: Any, shared: Any) -> Any:
        return shared[0]


class _LocalSteps:
    """The functions of such a transformation."""

    def __init__(self, optimizer: Any, every: int, rule: _Rule, exchange: _Exchange) -> None:
        import optax

        require_transformation(optimizer, _TAKER)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every is {every!r}, but it has to be a number of steps, 1 or more")
        self._optimizer = optax.with_extra_args_support(optimizer)
        self._every, self._rule, self._exchange = every, rule, exchange
        self._moved = optax.apply_updates

    def transformation(self) -> Any:
        import optax

        class LocalSteps(optax.GradientTransformationExtraArgs):
            """A transformation with local steps: `synchronize` ends an incomplete window of them."""

            synchronize = staticmethod(self.synchronize)

        return LocalSteps(self.init, self.update)

    def init(self, params: Any) -> LocalState:
        return LocalState(self._optimizer.init(params), self._rule.init(params), jnp.zeros((), jnp.int32))

    def update(self, gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, LocalState]:
        if params is None:
            raise ValueError(
                "local steps need the parameters, which they average: call "
                "optimizer.update(gradients, state, params)"
            )
        own, inner = self._optimizer.update(gradients, state.inner, params, **extra)
        own = jax.tree.map(_widened, own, params)
        steps = state.steps + 1

        def synchronized() -> tuple[Any, LocalState]:
            local = self._moved(params, own)
            average = self._average(local, state.shared, steps, has_ended=False)
            new, shared = self._rule.apply(average.tree, local, state.shared)
            updates = jax.tree.map(lambda value, old, like: value.astype(like.dtype) - old, new, params, own)
            return updates, LocalState(inner, shared, jnp.zeros((), jnp.int32))

        def alone() -> tuple[Any, LocalState]:
            return own, LocalState(inner, state.shared, steps)

        if self._every == 1:
            return synchronized()
        is_due = steps >= self._every
        if isinstance(is_due, jax.core.Tracer):
            return jax.lax.cond(is_due, synchronized, alone)
        return synchronized() if is_due else alone()

    def synchronize(self, params: Any, state: Any) -> tuple[Any, LocalState]:
        """Makes the parameters equal on all ranks, the last incomplete window included.

        All ranks must call it, outside jit, at the end of their data. Training may continue afterwards.

        Returns:
            The parameters and the state.

        Raises:
            ValueError: it is called inside jit.
            PeerLostError: a rank died.
        """
        if is_traced((params, state)):
            raise ValueError(
                "synchronize() waits until no rank has steps left, which a program cannot do: call it "
                "outside jit"
            )
        has_ended = False
        while not has_ended:
            average = self._average(params, state.shared, state.steps, has_ended=True)
            has_ended = bool(average.all_have_ended)
            shared = state.shared
            if average.weight:
                params, shared = self._rule.apply(average.tree, params, shared)
            else:
                params = self._rule.latest(params, shared)
            state = LocalState(state.inner, shared, jnp.zeros((), jnp.int32))
        params, shared = self._exchange.equalized((params, state.shared))
        return params, state._replace(shared=shared)

    def _average(self, local: Any, shared: Any, steps: Any, has_ended: bool) -> _Average:
        contribution = self._rule.contribution(local, shared)
        return self._exchange.average(contribution, steps, self._every, has_ended)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _times(array: Any, numerator: Any, denominator: Any) -> Any:
    """Returns the product with a quotient, of at least 32 bits; zeros for 0, whatever the elements are."""
    wide = array.astype(_wide(array.dtype))
    factor = jnp.asarray(numerator, wide.real.dtype) / denominator
    return jnp.where(factor == 0, jnp.zeros_like(wide), wide * factor)


def _widened(update: Any, parameter: Any) -> Any:
    """Returns an update with at least 32 bits, so that it reaches an average of 16 bits exactly."""
    return jnp.asarray(update, _wide(jnp.result_type(update, parameter)))


def _like(tree: Any, other: Any) -> Any:
    """Returns the arrays of `tree` with the dtypes of `other`."""
    return jax.tree.map(lambda value, like: value.astype(like.dtype), tree, other)
