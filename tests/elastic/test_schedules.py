"""Random schedules of losses and joins.

SIRTAKI_ELASTIC_SCHEDULES sets how many with numpy, SIRTAKI_ELASTIC_FRAMEWORK_SCHEDULES how many with each of
the others, and SIRTAKI_ELASTIC_FIRST_SCHEDULE the first seed.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
from elastic.schedules import TRAININGS, run_schedule
from tiers import exhaustive_unless

COUNT = int(os.environ.get("SIRTAKI_ELASTIC_SCHEDULES", "24"))
FRAMEWORK_COUNT = int(os.environ.get("SIRTAKI_ELASTIC_FRAMEWORK_SCHEDULES", "2"))
FIRST = int(os.environ.get("SIRTAKI_ELASTIC_FIRST_SCHEDULE", "1"))
FRAMEWORKS = [one for one in TRAININGS if one != "numpy"]


def skip_without_modules(name: str) -> None:
    """Skips the test if a framework is not installed; does not import it, which would cost seconds."""
    name = name.removesuffix("-sharded")
    needed = [*name.split("-"), *(["optax"] if name == "jax" else [])]
    missing = [one for one in needed if importlib.util.find_spec(one) is None]
    if missing:
        pytest.skip(f"there is no {missing[0]} here")


def seeds(count: int) -> list[object]:
    """Returns the seeds, of which the first sixth is in the second tier."""
    return [
        pytest.param(FIRST + index, marks=exhaustive_unless(index < max(1, count // 6)))
        for index in range(count)
    ]


@pytest.mark.parametrize("seed", seeds(COUNT))
def test_each_random_schedule_ends_exactly(seed: int) -> None:
    run_schedule(seed)


@pytest.mark.parametrize("seed", seeds(FRAMEWORK_COUNT))
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=exhaustive_unless(name in ("torch", "keras", "jax"))) for name in FRAMEWORKS],
)
def test_each_random_schedule_with_a_framework_ends_exactly(name: str, seed: int) -> None:
    skip_without_modules(name)
    run_schedule(seed, name)
