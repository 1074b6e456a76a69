"""Checks that ranks have the same parameters, outside of compiled programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from sirtaki.bindings import request as core
from sirtaki.bindings.context import current
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.jax.ops.collectives import _run
from sirtaki.jax.ops.exchange_options import ExchangeOptions
from sirtaki.jax.ops.programs import note_size
from sirtaki.numpy import consistency
from sirtaki.numpy.consistency import EagerChecks, Subject

BROADCAST = "params = hvd.broadcast_parameters(params, root_rank=0)"


def check_parameters(params: Any, process_set: ProcessSet = global_process_set) -> None:
    """Makes sure that all ranks of the set have the same parameters. All of them must call it, outside jit.

    It reads all arrays and sends 8 bytes; more only if they differ. `DistributedOptimizer` does this by
    itself, once, if `update` runs outside jit; inside it cannot.

    Args:
        params: any tree: parameters, an optimizer's state. Leaves other than arrays and numbers are not
            compared.
        process_set: the ranks that take part.

    Raises:
        ParametersDifferError: they differ. All ranks raise it, with the same text: which arrays differ, on
            which ranks, and by how much.
        PeerLostError: a rank died.

    Example:
        params = hvd.broadcast_parameters(params, root_rank=0)
        state = optimizer.init(params)
        hvd.check_parameters((params, state))
    """
    consistency.check(Subject(lambda: named(params)), BROADCAST, process_set)


def around(
    checks: EagerChecks, process_set: ProcessSet, gradients: Any, parameters: Any
) -> AbstractContextManager[None]:
    """Compares during the exchange inside the context; not in a program that is being traced."""
    if is_traced((gradients, parameters)):
        return nullcontext()
    subject = Subject(lambda: named(parameters))
    return checks.around(process_set, subject, lambda: (name for _, name in named(gradients)))


def is_traced(tree: Any) -> bool:
    """Returns whether a tree belongs to a program that is being traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a tree with their paths, as numpy arrays."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if is_array(leaf):
            yield jax.tree_util.keystr(path), np.asarray(leaf)


def is_array(leaf: Any) -> bool:
    """Returns whether it is an array or a number."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def is_key(leaf: Any) -> bool:
    """Returns whether it is an array of keys of jax.random."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def require_transformation(optimizer: Any, taker: str) -> None:
    """Raises TypeError for anything but a transformation of optax; `taker` begins the message."""
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(f"{taker} a transformation of optax, such as optax.adam(1e-3), not {optimizer!r}")


# ---- The initial state of ranks: equal parameters, and different keys for random numbers ---------------


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Copies the parameters of rank `root_rank` to all ranks of the set. All of them must call it.

    Args:
        params: any tree: parameters, an optimizer's state, keys of jax.random, a module of Equinox, a state
            of nnx. Leaves other than arrays and numbers, such as functions, stay this rank's.
        root_rank: the rank whose arrays are copied.
        process_set: the ranks that take part.

    Returns:
        The same tree with the root's arrays.

    Raises:
        ValueError: the root does not exist, or a dtype cannot be exchanged.
        MismatchError: the ranks' trees have different shapes or dtypes.
        PeerLostError: a rank died.

    Example:
        params = hvd.broadcast_parameters(params, root_rank=0)
        state = hvd.broadcast_parameters(optimizer.init(params), root_rank=0)
    """
    leaves, structure = jax.tree_util.tree_flatten(params)
    given = {place: leaf for place, leaf in enumerate(leaves) if is_array(leaf)}
    sent = {place: jax.random.key_data(leaf) if is_key(leaf) else leaf for place, leaf in given.items()}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    named = {f"{place:06}{paths[place]}": leaf for place, leaf in sent.items()}
    received = _run(named, ExchangeOptions(core.BROADCAST, (), "parameters", root=root_rank), process_set)
    for (place, leaf), name in zip(given.items(), named, strict=True):
        new = received[name]
        leaves[place] = jax.random.wrap_key_data(new, impl=jax.random.key_impl(leaf)) if is_key(leaf) else new
    return structure.unflatten(leaves)


def rank_key(key: Any) -> Any:
    """Derives this rank's own key from a key that all ranks share: for dropout, augmentation and the like.

    Nothing is sent. Raises NotInitializedError (a ValueError) before init().

    Example:
        key = hvd.rank_key(jax.random.key(0))
        mask = jax.random.bernoulli(key, 0.9, inputs.shape)  # another one on each rank
    """
    note_size()  # the key itself may be a constant of the program
    return jax.random.fold_in(key, current().rank)
