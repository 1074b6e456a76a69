"""The world that an engine, such as Spark or Ray, has assigned to this process.

An engine calls functions in its own processes, so that nothing travels through their environment: programs
that they start would inherit it, and the key with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sirtaki.runner.rendezvous.providers.world import World


@dataclass
class _State:
    world: World | None = None


_state = _State()


def find(environment: Mapping[str, str]) -> World | None:
    """Returns the world of this process; None if no engine has assigned one. The environment is unused."""
    return _state.world


def assign(world: World | None) -> None:
    """Assigns a world to this process until the next call; None: it has none any more."""
    _state.world = world
