"""Random schedules of losses and joins. SIRTAKI_ELASTIC_SCHEDULES sets how many."""

from __future__ import annotations

import os

import pytest
from elastic.schedules import run_schedule

COUNT = int(os.environ.get("SIRTAKI_ELASTIC_SCHEDULES", "24"))
FIRST = int(os.environ.get("SIRTAKI_ELASTIC_FIRST_SCHEDULE", "1"))


@pytest.mark.parametrize("seed", [1, 3])
def test_a_random_schedule_ends_exactly(seed: int) -> None:
    run_schedule(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_each_random_schedule_ends_exactly(seed: int) -> None:
    run_schedule(seed)
