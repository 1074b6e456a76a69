"""The initial state of ranks: equal parameters, and different keys for random numbers."""

from __future__ import annotations

from typing import Any

import jax

from sirtaki.bindings import request as core
from sirtaki.bindings.default_context import current
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.jax.ops.collectives import _run
from sirtaki.jax.ops.exchange_options import ExchangeOptions
from sirtaki.jax.ops.programs import note_size
from sirtaki.jax.training.consistency import is_array, is_key


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
    """
    note_size()  # the key itself may be a constant of the program
    return jax.random.fold_in(key, current().rank)
