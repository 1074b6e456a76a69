"""Random states that are equal on all ranks, as if there were one process.

Every rank runs the whole script, so all ranks have to make the same random choices: initial weights, orders
of data, augmentations. The generators of Python, NumPy and the frameworks therefore begin with one seed of
rank 0, and a seed that the script sets is the script's own, equal everywhere. Only operations on a rank's own
rows, such as dropout, are to draw other numbers than those of other ranks: see `own_states`.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sirtaki.bindings.default_context import current
from sirtaki.bindings.user_code import is_internal

SEED_BYTES = 16
_NUMPY_LIMIT = 2**32  # of seeds for numpy.random.seed, exclusive
_TORCH_LIMIT = 2**63


@dataclass
class _Shared:
    """The seed of rank 0, and how many generators have been derived from it."""

    seed: int = 0
    generators: int = 0


_shared = _Shared()


def new_seed() -> bytes:
    """Returns fresh bytes for a seed, rank 0's for all ranks."""
    return secrets.token_bytes(SEED_BYTES)


def share(seed: bytes) -> None:
    """Seeds Python's generator; those of libraries follow when the script has imported them."""
    _shared.seed = int.from_bytes(seed, "little")
    random.seed(_shared.seed)


def seed_numpy(module: ModuleType) -> None:
    """Seeds `numpy.random`, and makes generators without a seed of their own equal on all ranks."""
    generators: Any = module
    generators.seed(_shared.seed % _NUMPY_LIMIT)
    original: Callable[..., Any] = generators.default_rng

    def default_rng(seed: Any = None) -> Any:
        if seed is None and not is_internal(sys._getframe(1).f_code.co_filename):
            _shared.generators += 1
            seed = [*_shared.seed.to_bytes(SEED_BYTES, "little"), _shared.generators]
        return original(seed)

    default_rng.__doc__, default_rng.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    generators.default_rng = default_rng


def seed_torch(module: ModuleType) -> None:
    """Seeds torch's generators of all devices."""
    torch: Any = module
    torch.manual_seed(_shared.seed % _TORCH_LIMIT)


def seed_tensorflow(module: ModuleType) -> None:
    """Sets TensorFlow's global seed."""
    tensorflow: Any = module
    tensorflow.random.set_seed(_shared.seed % _NUMPY_LIMIT)


def own_states() -> None:
    """Gives ranks above 0 their own states of torch's generators, once the model is equal on all ranks.

    They are derived from the state at this moment: a script that sets a seed gets the same states again.
    Rank 0 keeps its state. So do the generators of Python and NumPy on all ranks: scripts shuffle and augment
    data with them, and choose what a whole batch goes through, in which ranks must not differ.
    """
    torch: Any = sys.modules.get("torch")
    rank = current().rank
    if torch is None or rank == 0:
        return
    drawn = int(torch.randint(_TORCH_LIMIT - 1, (1,)).item())
    torch.manual_seed(_derived(drawn, rank) % _TORCH_LIMIT)


def _derived(seed: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{rank}".encode()).digest(), "little")
