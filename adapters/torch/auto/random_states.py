"""Random states: equal on all ranks, except while a rank computes its part of a batch.

Loaders, initial values and everything else that a script draws between batches have to be the same on all
ranks; the numbers that a step draws for its rows, such as those of dropout, have to differ.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch


@dataclass
class _States:
    """This rank's own states while they are not in use, and the common ones while they are not."""

    own: list[Any] | None = None
    common: list[Any] | None = None


_states = _States()


def captured() -> list[Any]:
    """Returns the random states of torch, Python and NumPy."""
    numpy = sys.modules.get("numpy")
    return [torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None]


def restore(states: list[Any]) -> None:
    """Sets random states."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


def enter_own(rank: int) -> None:
    """Begins to draw this rank's own numbers."""
    _states.common = captured()
    if _states.own is not None:
        restore(_states.own)
        return
    text = f"{torch.initial_seed()} {rank}".encode()
    seed = int.from_bytes(blake2b(text, digest_size=4).digest(), "big")
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def leave_own() -> None:
    """Continues with the numbers that all ranks draw."""
    if _states.common is not None:
        _states.own = captured()
        restore(_states.common)
        _states.common = None


@contextmanager
def common() -> Iterator[None]:
    """Draws the numbers of all ranks inside."""
    if _states.common is None:
        yield
        return
    own = captured()
    restore(_states.common)
    try:
        yield
    finally:
        _states.common = captured()
        restore(own)
