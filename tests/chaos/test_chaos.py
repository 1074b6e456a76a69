"""A few random trials of jobs that fail, the same ones each time; `run.py` runs any number of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiers import exhaustive_unless
from trial import heed_interrupts, plan_of, run

# Seeds by kind of program: trials with a framework take seconds to import it on each rank.
SEEDS = {
    "numpy": [*range(24), 300055],  # in the last trial, two ends of a broken connection accuse each other
    "torch": range(100, 103),
    "DataLoader": range(200, 202),
    "jit": range(300, 303),
    "tf.function": range(400, 402),
    "keras": range(500, 502),
}
SECOND_TIER = {
    *(("numpy", seed) for seed in (*range(8), 300055)),
    *((name, seeds[0]) for name, seeds in SEEDS.items()),
}


@pytest.mark.parametrize(
    ("flavour", "seed"),
    [
        pytest.param(name, seed, marks=exhaustive_unless((name, seed) in SECOND_TIER))
        for name, seeds in SEEDS.items()
        for seed in seeds
    ],
)
def test_a_job_with_a_fault_ends_as_it_has_to(flavour: str, seed: int) -> None:
    heed_interrupts()
    result = run(plan_of(seed, {flavour: 1}))
    assert not result.problems, f"{result.plan}\n{result.output}"
