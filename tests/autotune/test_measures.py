"""The measures of autotune's model: what the counters say of a step, and its description."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from exchanged_steps import ROUTES, STEP, K, M, of

from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.common.autotune import tuner
from sirtaki.common.autotune.model import (
    Counts,
    StepDifference,
    StepMeasures,
    TunedJob,
    describe,
    describe_bytes,
    measure,
)

SHARED = {("all-reduce", "shared memory"): 100, ("all-reduce", "none"): 40}
BEFORE = Counts(7, 140, 1, 50, 10 * M, 2.0, 3.0, 1.5, SHARED)
AFTER = Counts(
    8,
    146,
    1,
    53,
    14 * M,
    2.25,
    3.5,
    1.625,
    {("all-reduce", "shared memory"): 104, ("all-reduce", "none"): 42},
)


def test_a_step_is_the_difference_of_two_counts() -> None:
    assert measure([BEFORE, AFTER], [1.0]) == StepMeasures([STEP], ROUTES)
    again = replace(AFTER, steps=9, operations=150, plans=54, bytes=15 * M)
    measures = measure([BEFORE, AFTER, again], [1.0, 2.0])
    assert measures is not None
    assert measures.steps[1] == StepDifference(2.0, 4, 1, M, 0.0, 0.0, 0.0, 0)


def test_only_what_the_steps_have_done_is_among_their_routes() -> None:
    before, after = (
        replace(one, routes={**one.routes, ("send", "links"): 3, ("broadcast", "links"): number})
        for one, number in [(BEFORE, 0), (AFTER, 1)]
    )
    measures = measure([before, after], [1.0])
    assert measures is not None
    assert measures.routes == ROUTES | {("broadcast", "links")}


@pytest.mark.parametrize(
    ("before", "after", "exposed"), [(None, None, None), (None, 0.25, 0.25), (0.25, 0.75, 0.5)]
)
def test_exposed_time_may_begin_later_or_never(
    before: float | None, after: float | None, exposed: float | None
) -> None:
    measures = measure([replace(BEFORE, exposed=before), replace(AFTER, exposed=after)], [1.0])
    assert measures is not None
    assert measures.steps[0].exposed == exposed


@pytest.mark.parametrize(
    "change",
    [
        {"plans": 50},
        {"bytes": 10 * M},
        {"failed": 2},
        {"steps": 7},
        {"steps": 9},  # another optimizer, or a compiled program, has taken one as well
        {"routes": {**AFTER.routes, ("send", "links"): 1}},
        {"routes": {**AFTER.routes, ("all-to-all", "shared memory"): 1}},
        {"routes": {**AFTER.routes, ("add process set", "none"): 1}},
    ],
    ids=str,
)
def test_unclear_steps_are_no_measures(change: dict[str, Any]) -> None:
    assert measure([BEFORE, replace(AFTER, **change)], [1.0]) is None


def test_without_time_or_steps_there_are_no_measures() -> None:
    assert measure([BEFORE, AFTER], [0.0]) is None
    assert measure([BEFORE], []) is None


def test_the_description_has_sizes_times_and_bandwidth() -> None:
    step = replace(STEP, bytes=25 * M, plans=12, moving=0.0108, empty=0)
    assert describe(of(step, step)) == "25 MiB in 12 plans a step; 0.9 ms a plan of 1 MiB to 4 MiB; 2.4 GB/s"


def test_the_description_has_each_size_class() -> None:
    large = replace(STEP, bytes=25 * M, plans=5, moving=0.02, empty=0)
    small = replace(large, bytes=5 * K, moving=0.001)
    assert describe(of(large, small, large)) == (
        "25 MiB in 5 plans a step; 0.2 ms a plan of 1 KiB to 4 KiB; 4 ms a plan of 4 MiB to 16 MiB; 1.3 GB/s"
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (400 * 10**9, "400 GB/s"),
        (996 * 10**8, "100 GB/s"),
        (10**8, "0.1 GB/s"),
        (99 * 10**6, "99 MB/s"),
        (80, "8e-05 MB/s"),
    ],
)
def test_the_description_has_a_unit_of_bandwidth(size: int, text: str) -> None:
    assert describe(of(replace(STEP, bytes=size, moving=1.0))).rpartition("; ")[2] == text


def test_the_description_leaves_out_what_has_moved_nothing() -> None:
    step = replace(STEP, bytes=10, plans=3, moving=0.0, empty=2)
    assert describe(of(step)) == "10 bytes in 1 plan a step; 0 ms a plan of 4 bytes to 16 bytes"
    assert describe(of(replace(step, plans=9, empty=3))).startswith("10 bytes in 9 plans")
    assert describe(of(step, replace(step, plans=0, bytes=0))) == describe(of(step))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (25.6 * M, "25.6 MiB"),
        (3 << 40, "3072 GiB"),
    ],
)
def test_sizes_have_units(size: float, text: str) -> None:
    assert describe_bytes(size) == text


@pytest.mark.parametrize(("ranks", "cores", "ranks_per_core"), [(2, 2, 1), (3, 2, 2), (1, 8, 1), (8, 1, 8)])
@pytest.mark.parametrize("further_set", [None, 1, 9])
def test_a_job_with_process_sets_is_not_known(
    ranks: int, cores: int, ranks_per_core: int, further_set: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def members(number: int) -> list[int]:
        if number != further_set:
            raise ValueError
        return [1, 2]

    monkeypatch.setattr(tuner, "usable_cores", lambda: cores)
    context: Any = SimpleNamespace(members=members, topology=SimpleNamespace(local_size=ranks))
    optimizer = Stepper("gradient", operations=6, bytes=M, parts=2)
    known = TunedJob(ranks_per_core, operations=6, bytes=M, parts=2)
    assert tuner.job_of(context, optimizer) == (None if further_set else known)
