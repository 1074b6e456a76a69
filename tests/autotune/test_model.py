"""The judgements of autotune's model: the bounds of changes, which of them are left out, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from exchanged_steps import JOB, START, STEP, K, M, of
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.common.autotune.model import (
    TUNED,
    Judgement,
    StepDifference,
    StepMeasures,
    TunedJob,
    candidates,
    judge,
    number_of,
)
from sirtaki.common.autotune.search import MARGIN, SettingChange

CHANGES = candidates(START)


def reasons(measures: StepMeasures, job: TunedJob = JOB, **start: str) -> dict[str, str]:
    """Returns why changes are left out, by their text."""
    begin = {**START, **start}
    return {
        str(one.change): one.reason for one in judge(measures, job, begin, candidates(begin)) if one.reason
    }


@given(st.lists(st.sampled_from(CHANGES), unique=True))
def test_without_measures_nothing_is_left_out(changes: list[SettingChange]) -> None:
    assert judge(None, JOB, START, changes) == [Judgement(change, inf) for change in changes]


# ---- Bounds --------------------------------------------------------------------------------------------


def test_the_bound_of_each_change() -> None:
    """Ranks that wait poll for 0.2 ms with 3 plans, at the end, and once in the second of the step."""
    bounds = {str(one.change): one.saving for one in judge(of(STEP), JOB, START, CHANGES)}
    polls = (3 + 1 + 1) * 0.0002
    assert bounds["hand_over=early"] == pytest.approx(0.125)
    assert bounds["hand_over=late"] == pytest.approx(0.125 + 0.5 + polls + 5 * 0.0002)
    assert bounds["spin=0"] == bounds["chunk_bytes=131072"] == pytest.approx(0.125 + 0.5 + polls)
    assert [one.reason for one in judge(of(STEP), JOB, START, CHANGES)] == [""] * len(CHANGES)


@pytest.mark.parametrize(
    ("step", "job"),
    [
        (replace(STEP, exposed=None), JOB),
        (replace(STEP, operations=7), JOB),  # one of them is not the optimizer's
        (STEP, TunedJob(1)),
    ],
    ids=["not measured", "others", "unknown"],
)
def test_without_the_exposed_time_of_all_operations_it_is_the_time_in_flight(
    step: StepDifference, job: TunedJob
) -> None:
    bounds = {str(one.change): one.saving for one in judge(of(step), job, START, CHANGES)}
    assert bounds["hand_over=early"] == pytest.approx(0.25 + 0.5)
    assert bounds["spin=0"] == pytest.approx(0.25 + 0.5 + 0.5 + 5 * 0.0002)


def test_the_median_of_what_is_left_counts() -> None:
    """Steps of 5, 1 and 1 s could take 4.875, 0.5 and 0.875 s."""
    long, waiting = replace(STEP, seconds=5.0), replace(STEP, exposed=0.5)
    bounds = {str(one.change): one.saving for one in judge(of(long, waiting, STEP), JOB, START, CHANGES)}
    assert bounds["hand_over=early"] == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("spin", "ranks", "polls"), [("0", 1, 0.0005), ("0.002", 1, 0.01), ("0.002", 3, 0.03)]
)
def test_polls_grow_with_the_ranks_of_a_core(spin: str, ranks: int, polls: float) -> None:
    job = replace(JOB, ranks_per_core=ranks)
    bounds = {str(one.change): one.saving for one in judge(of(STEP), job, {**START, "spin": spin}, CHANGES)}
    assert bounds["report_window=0.003"] == pytest.approx(0.125 + 0.5 + polls)


def test_the_changes_that_could_save_most_come_first() -> None:
    ranked = [str(one.change) for one in judge(of(STEP), JOB, START, CHANGES)]
    others = [str(one) for one in CHANGES if one.setting != "hand_over"]
    assert ranked == ["hand_over=late", *others, "hand_over=early"]


def test_an_exchange_within_the_margin_leaves_out_everything() -> None:
    step = replace(STEP, moving=0.005, exposed=0.004)
    found = reasons(of(step), report_bytes=f"{M}", fusion_threshold=f"{64 * M}")
    assert set(found) == {
        str(one) for one in candidates({**START, "report_bytes": f"{M}", "fusion_threshold": f"{64 * M}"})
    }
    assert set(found.values()) == {"no more than 1.1% of a step could be saved"}
    assert reasons(of(replace(step, exposed=0.014))) == {
        "hand_over=early": "no more than 1.4% of a step could be saved"
    }


STEPS = st.builds(
    StepDifference,
    seconds=st.floats(1e-4, 10),
    operations=st.sampled_from([1, 6, 400]),
    plans=st.integers(1, 50),
    bytes=st.integers(0, 1 << 31),
    waiting=st.floats(0, 0.1),
    moving=st.floats(0, 0.1),
    exposed=st.none() | st.floats(0, 0.1),
    empty=st.integers(0, 4),
)
BACKENDS = st.sampled_from(["shared memory", "links", "hierarchical", "nccl", "none"])
MEASURES = st.builds(
    StepMeasures,
    st.lists(STEPS, min_size=1, max_size=7),
    st.frozensets(st.tuples(st.sampled_from(["all-reduce", "all-gather", "barrier"]), BACKENDS), min_size=1),
)
JOBS = st.builds(
    TunedJob, st.integers(1, 8), st.sampled_from([0, 1, 6]), st.integers(0, 1 << 30), st.integers(0, 1000)
)
STARTS = st.fixed_dictionaries(
    {
        "hand_over": st.sampled_from(["auto", "early", "late"]),
        "chunk_bytes": st.sampled_from(["0", "4096", "524288"]),
        "fusion_threshold": st.sampled_from(["0", "67108864", "128M"]),
        "report_bytes": st.sampled_from(["1", "1048576"]),
        "report_window": st.sampled_from(["0.0003", "0"]),
        "spin": st.sampled_from(["0", "0.0002", "0.1"]),
    }
)


@settings(deadline=None, max_examples=200)
@given(MEASURES, JOBS, STARTS)
def test_what_could_save_more_than_the_margin_is_never_left_out(
    measures: StepMeasures, job: TunedJob, start: dict[str, str]
) -> None:
    changes = candidates(start)
    judgements = judge(measures, job, start, changes)
    assert {one.change for one in judgements} == set(changes)
    assert len(judgements) == len(changes)
    for one in judgements:
        assert bool(one.reason) == (one.saving < MARGIN)
    savings = [one.saving for one in judgements]
    assert savings == sorted(savings, reverse=True)


@settings(deadline=None)
@given(MEASURES, JOBS, STARTS)
def test_longer_steps_with_the_same_exchange_never_bring_a_change_back(
    measures: StepMeasures, job: TunedJob, start: dict[str, str]
) -> None:
    longer = replace(measures, steps=[replace(one, seconds=2 * one.seconds) for one in measures.steps])
    left_out, still = (
        {one.change for one in judge(each, job, start, candidates(start)) if one.reason}
        for each in (measures, longer)
    )
    assert left_out <= still


# ---- What changes nothing ------------------------------------------------------------------------------

FEWER = "a step has fewer bytes than both values"
AT_ONCE = "the gradients of a step are too few to be handed over in parts"


def test_sizes_beyond_the_bytes_of_a_step_do_the_same() -> None:
    small, job = replace(STEP, bytes=200 * K), replace(JOB, bytes=200 * K)
    assert reasons(of(small), job) == {
        "chunk_bytes=1048576": "a step has fewer bytes than this and chunk_bytes=524288",
        "fusion_threshold=4194304": "a step has fewer bytes than this and fusion_threshold=67108864",
        "report_bytes=16777216": "a step has fewer bytes than this and report_bytes=1048576",
    }
    usual = {"chunk_bytes": f"{M}", "fusion_threshold": f"{64 * M}", "report_bytes": f"{M}"}
    assert reasons(of(small), job, **usual) == {
        "chunk_bytes=524288": FEWER,
        "fusion_threshold=4194304": FEWER,
        "report_bytes=16777216": FEWER,
    }


@pytest.mark.parametrize(("largest", "is_left_out"), [(2 * M - 1, True), (2 * M, False)])
@pytest.mark.parametrize("where", ["step", "optimizer"])
def test_two_steps_have_to_be_smaller(largest: int, is_left_out: bool, where: str) -> None:
    """The optimizer knows the bytes of gradients that were absent on all ranks, or compressed."""
    step = replace(STEP, bytes=largest if where == "step" else K)
    job = replace(JOB, bytes=largest if where == "optimizer" else K)
    found = reasons(of(replace(step, bytes=7), step), job, fusion_threshold=f"{64 * M}")
    assert ("fusion_threshold=4194304" in found) == is_left_out


@pytest.mark.parametrize(
    "routes",
    [
        {("all-gather", "shared memory")},  # may be larger in the next step
        {("all-reduce", "shared memory"), ("all-reduce", "none")},  # absent: with an unknown size
    ],
)
def test_unknown_sizes_leave_out_nothing(routes: set[tuple[str, str]]) -> None:
    step = replace(STEP, bytes=K)
    assert reasons(of(step, routes=frozenset(routes)), TunedJob(1)) == {}
    assert reasons(of(step, routes=frozenset({("all-reduce", "links"), ("barrier", "none")})), TunedJob(1))


def test_one_tensor_cannot_be_fused() -> None:
    routes = frozenset({("all-gather", "hierarchical")})
    one = replace(STEP, operations=1)
    because = "a step exchanges one tensor"
    assert reasons(of(one, routes=routes), TunedJob(1)) == {
        "fusion_threshold=67108864": because,
        "fusion_threshold=4194304": because,
    }
    assert reasons(of(one, replace(one, operations=2), routes=routes), TunedJob(1)) == {}


@pytest.mark.parametrize("backend", ["links", "nccl", "single rank"])
def test_chunks_do_not_matter_without_shared_memory(backend: str) -> None:
    routes = frozenset({("all-reduce", backend), ("all-reduce", "none"), ("barrier", "none")})
    found = reasons(of(STEP, routes=routes), TunedJob(1))
    sizes = [str(one) for one in CHANGES if one.setting == "chunk_bytes"]
    assert found == dict.fromkeys(sizes, "no tensor goes through shared memory")
    for other in ("shared memory", "hierarchical", "staged"):
        assert reasons(of(STEP, routes=routes | {("broadcast", other)}), TunedJob(1)) == {}


def test_few_gradients_are_handed_over_at_once() -> None:
    one_part = replace(JOB, parts=1)
    assert reasons(of(STEP), one_part) == {"hand_over=early": AT_ONCE, "hand_over=late": AT_ONCE}
    assert reasons(of(STEP), replace(JOB, parts=2)) == {}
    assert reasons(of(STEP), replace(JOB, parts=0)) == {}
    assert reasons(of(STEP, replace(STEP, operations=5)), one_part) == {}  # an optimizer of more gradients


def plans_of(sizes: Sequence[int], threshold: int) -> list[list[int]]:
    """Fuses tensors as the coordinator does (core/control/coordinator/fusion.cc)."""
    plans: list[list[int]] = []
    last: list[int] | None = None  # the plan to which tensors may be added
    for size in sizes:
        if last is not None and size < threshold and sum(last) + size <= threshold:
            last.append(size)
            continue
        plans.append([size])
        if size < threshold:
            last = plans[-1]
    return plans


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([8, K, 60 * K, 300 * K, M, 3 * M, 9 * M, 70 * M]), min_size=1, max_size=6),
    st.sampled_from(["0", f"{4 * M}", f"{64 * M}", "128M"]),
)
def test_left_out_thresholds_make_the_same_plans(sizes: list[int], threshold: str) -> None:
    start = {**START, "fusion_threshold": threshold}
    step = replace(STEP, bytes=sum(sizes), operations=len(sizes))
    routes = frozenset({("all-reduce", "shared memory")})
    judgements = judge(of(step, routes=routes), TunedJob(1), start, candidates(start))
    same = [
        threshold,
        *(one.change.value for one in judgements if is_about(one, "fusion_threshold") and not one.reason),
    ]
    for one in judgements:
        if is_about(one, "fusion_threshold") and one.reason:
            made = plans_of(sizes, number_of("fusion_threshold", one.change.value))
            assert made in [plans_of(sizes, number_of("fusion_threshold", value)) for value in same]


def is_about(judgement: Judgement, setting: str) -> bool:
    return judgement.change.setting == setting


def test_all_settings_are_judged() -> None:
    assert {one.change.setting for one in judge(of(STEP), JOB, START, CHANGES)} == set(TUNED)
