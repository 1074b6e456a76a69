"""The two tiers: `make test` runs the tests without the marker `full`, `make test-full` those with it.

A test gets the marker if it shows at a high cost what the first tier shows elsewhere: in another world, on
another backend, in a whole training, with random faults. Each behaviour has a test in the first tier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from cases import MODULES, cases_for


def full_unless(is_first: bool) -> Collection[pytest.MarkDecorator]:
    """Returns the marks of a parameter set, which belongs to the first tier or to the full one."""
    return () if is_first else (pytest.mark.full,)


def in_worlds(
    worlds: Iterable[tuple[int, str]],
    first: Collection[tuple[int, str]],
    modules: tuple[str, ...] = MODULES,
) -> list[Any]:
    """Returns each world (its size and how it is connected) with each case; `first` are of the first tier."""
    return [
        pytest.param(
            size, kind, case, id=f"{size}-{kind}-{case.name}", marks=full_unless((size, kind) in first)
        )
        for size, kind in worlds
        for case in cases_for(size, modules)
    ]
