"""Random numbers: equal on all ranks where data are read, this rank's own inside the model's steps."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np

from sirtaki.bindings.context import current
from sirtaki.common.ops.objects import broadcast_object
from sirtaki.keras._private import random_numbers, replaced

_FOLD = 0x9E3779B1  # spreads the ranks over the seeds


def equalise() -> None:
    """Gives all ranks rank 0's states of Python's, numpy's and torch's random numbers. All call it."""
    torch = sys.modules.get("torch")  # a DataLoader may be read on every backend
    mine = random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state().numpy()
    theirs = broadcast_object(mine, 0, "sirtaki.auto.random_states")
    if current().rank:
        random.setstate(theirs[0])
        np.random.set_state(theirs[1])
        if torch is not None:
            torch.set_rng_state(torch.from_numpy(theirs[2].copy()))


def own_seeds(model: Any, done: set[int]) -> None:
    """Gives each seed generator of a model (of dropout, noise, ...) a seed of this rank's own, once."""
    known = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    for state in model.variables:
        if id(state) in known | done or tuple(state.shape) != (2,) or "int" not in str(state.dtype):
            continue
        done.add(id(state))
        if rank := current().rank:
            seed, count = (int(item) for item in keras.ops.convert_to_numpy(state))
            state.assign(np.asarray([(seed + rank * _FOLD) % 2**31, count]).astype(str(state.dtype)))


class _TorchState:
    """The state of torch's random numbers inside the steps, from which dropout takes them."""

    own: Any = None


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Makes torch's random numbers this rank's own inside, if the model takes them from there."""
    if keras.backend.backend() != "torch":
        yield
        return
    import torch

    outside = torch.get_rng_state()
    if _TorchState.own is None:
        generator = torch.Generator().manual_seed((torch.initial_seed() + current().rank * _FOLD) % 2**63)
        _TorchState.own = generator.get_state()
        if torch.cuda.is_initialized() and current().rank:
            torch.cuda.manual_seed((torch.cuda.initial_seed() + current().rank * _FOLD) % 2**63)
    torch.set_rng_state(_TorchState.own)
    try:
        yield
    finally:
        _TorchState.own = torch.get_rng_state()
        torch.set_rng_state(outside)


def expected_values() -> AbstractContextManager[None]:
    """Replaces the random numbers of layers inside by their means, and switches dropout off.

    So results on a batch and on its parts can be compared. Functions that have no such value stay random.
    """

    def filled(value_of: Any) -> Any:
        def constant(shape: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
            value = value_of(*args, **{name: item for name, item in kwargs.items() if name != "seed"})
            return keras.ops.full(shape, value, dtype=dtype or keras.config.floatx())

        return constant

    return replaced(
        random_numbers(),
        dropout=lambda inputs, *args, **kwargs: inputs,
        normal=filled(lambda mean=0.0, stddev=1.0: mean),
        truncated_normal=filled(lambda mean=0.0, stddev=1.0: mean),
        uniform=filled(lambda minval=0.0, maxval=1.0: (minval + maxval) / 2),
    )
