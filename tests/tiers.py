"""The two tiers: `make test` runs the tests without the marker `full`, `make test-full` those with it.

A test gets the marker if it shows at a high cost what the first tier shows elsewhere: in another world, on
another backend, in a whole training, with random faults. Each behaviour has a test in the first tier.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest


def full_unless(is_first: bool) -> Collection[pytest.MarkDecorator]:
    """Returns the marks of a parameter set, which belongs to the first tier or to the full one."""
    return () if is_first else (pytest.mark.full,)
