"""The search of autotune, on simulated machines: it finds what is faster, and keeps nothing slower."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import pytest
from exchanged_steps import START
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.common.autotune.model import TUNED, candidates
from sirtaki.common.autotune.search import MARGIN, Block, Findings, SettingChange, is_proven, search

Factors = Mapping[SettingChange, float]


@dataclass
class Machine:
    """A machine on which each change multiplies the time of a step by a factor of its own."""

    factors: Factors
    noise: Callable[[], float] = lambda: 1.0
    blocks: list[Block] = field(default_factory=list)

    def cost(self, chosen: Mapping[str, str]) -> float:
        return math.prod(self.factors.get(SettingChange(*one), 1.0) for one in chosen.items())

    def tune(self, most_blocks: int = 10_000) -> Findings:
        """Runs a search, or its first blocks."""
        findings = Findings(START, START)
        blocks = search(findings, candidates(START))
        score = None
        for _ in range(most_blocks):
            try:
                block = next(blocks) if score is None else blocks.send(score)
            except StopIteration:
                break
            self.blocks.append(block)
            score = self.cost(block.settings) * self.noise()
        return findings


def best_of(factors: Factors) -> dict[str, str]:
    """Returns the fastest settings, by the factors of each setting alone."""
    best = dict(START)
    for name in TUNED:
        worth = {one.value: factor for one, factor in factors.items() if one.setting == name}
        if worth and min(worth.values()) < 1 - MARGIN:
            best[name] = min(worth, key=lambda value: worth[value])
    return best


EACH = st.dictionaries(
    st.sampled_from(candidates(START)), st.sampled_from([0.3, 0.5, 0.6, 0.8, 0.9, 1.0, 1.01, 1.2, 4.0])
)


def test_there_are_about_a_dozen_changes() -> None:
    assert 10 <= len(candidates(START)) <= 16
    assert SettingChange("hand_over", "early") in candidates(START)
    assert SettingChange("chunk_bytes", "524288") in candidates({**START, "chunk_bytes": "1M"})
    assert SettingChange("chunk_bytes", "1048576") not in candidates({**START, "chunk_bytes": "1M"})
    assert {one.setting for one in candidates(START)} == set(TUNED)
    assert "chunk_bytes" not in {one.setting for one in candidates({**START, "chunk_bytes": "0"})}


@settings(deadline=None, max_examples=100)
@given(EACH)
def test_without_noise_it_ends_at_least_as_fast_as_any_single_change(factors: Factors) -> None:
    machine = Machine(factors)
    findings = machine.tune()
    assert findings.is_finished
    at_the_end = machine.cost(findings.kept)
    assert at_the_end <= 1
    assert at_the_end <= min([1.0, *factors.values()]) or math.isclose(at_the_end, 1.0)
    assert set(findings.kept) == set(START)


def test_it_finds_the_best_of_each_setting() -> None:
    factors = {
        SettingChange("chunk_bytes", "524288"): 0.4,
        SettingChange("chunk_bytes", "262144"): 0.5,
        SettingChange("hand_over", "late"): 0.7,
        SettingChange("hand_over", "early"): 1.3,
        SettingChange("spin", "0"): 1.5,
        SettingChange("fusion_threshold", "67108864"): 0.9,
    }
    findings = Machine(factors).tune()
    assert findings.kept == best_of(factors)
    assert [str(one.change) for one in findings.verdicts if one.is_kept] == [
        "chunk_bytes=524288",
        "hand_over=late",
        "fusion_threshold=67108864",
    ]
    assert findings.whole_ratio == pytest.approx(0.4 * 0.7 * 0.9)


@pytest.mark.parametrize("factor", [1.0, 0.99, 1 - MARGIN])
def test_a_gain_within_the_margin_is_not_kept(factor: float) -> None:
    findings = Machine({SettingChange("spin", "0.002"): factor}).tune()
    assert findings.kept == START
    assert [verdict.is_kept for verdict in findings.verdicts] == [False, False]


@pytest.mark.parametrize("seed", range(40))
def test_under_noise_it_never_ends_slower_than_it_began(seed: int) -> None:
    """Steps vary by 10 %, some take five times as long, and the machine becomes slower and slower."""
    draw = random.Random(seed)
    factors = {one: draw.choice([0.5, 0.9, 1.0, 1.1, 2.0]) for one in candidates(START)}
    speed = 1.0

    def noise() -> float:
        nonlocal speed
        speed *= 1.003
        steps = (draw.lognormvariate(0, 0.1) * (5 if draw.random() < 0.05 else 1) for _ in range(5))
        return speed * median(steps)

    machine = Machine(factors, noise)
    findings = machine.tune()
    assert findings.is_finished
    assert machine.cost(findings.kept) <= 1
    assert machine.cost(findings.kept) <= 1.25 * machine.cost(best_of(factors)) or not findings.changes


@pytest.mark.parametrize("seed", range(20))
def test_where_no_change_helps_nothing_slower_is_kept(seed: int) -> None:
    draw = random.Random(seed)
    factors = {one: draw.choice([1.0, 1.03, 1.2]) for one in candidates(START)}
    machine = Machine(factors, lambda: draw.lognormvariate(0, 0.03))
    assert machine.cost(machine.tune().kept) == 1


def test_what_misleads_at_first_is_reverted_in_the_end() -> None:
    """A change that helps at first, and harms as soon as it is kept, does not survive the last proof."""
    change = SettingChange("spin", "0")
    machine = Machine({change: 0.5})
    cost, counts = machine.cost, {"kept": 0}

    def misleading(chosen: Mapping[str, str]) -> float:
        counts["kept"] += machine.blocks[-1].purpose.endswith("kept")
        return cost(chosen) if not counts["kept"] else 1 / cost(chosen)

    machine.cost = misleading  # type: ignore[method-assign]
    findings = machine.tune()
    assert findings.kept == START
    assert findings.changes == []
    assert findings.whole_ratio == 2.0


@pytest.mark.parametrize("blocks", [0, 1, 30, 60, 90, 150])
def test_a_search_that_is_cut_short_has_kept_what_was_proven(blocks: int) -> None:
    machine = Machine({SettingChange("chunk_bytes", "524288"): 0.4, SettingChange("hand_over", "late"): 0.7})
    findings = machine.tune(blocks)
    assert not findings.is_finished
    proven = {verdict.change for verdict in findings.verdicts if verdict.is_kept}
    assert set(findings.changes) == proven


def test_changes_are_measured_in_turns_with_the_settings_without_them() -> None:
    machine = Machine({SettingChange("hand_over", "late"): 0.7})
    machine.tune()
    for without, block in zip(machine.blocks[::2], machine.blocks[1::2], strict=True):
        assert without.purpose == f"without: {block.purpose}"
        different = {name for name in START if without.settings[name] != block.settings[name]}
        assert len(different) == 1


@pytest.mark.parametrize(
    ("ratios", "proven"),
    [
        ([0.9, 0.9, 0.9, 0.9, 0.9], True),
        ([0.9, 0.9, 0.9, 0.9, 1.5], True),
        ([0.9, 0.9, 0.9, 1.5, 1.5], False),
        ([0.99, 0.99, 0.99, 0.99, 0.99], False),
    ],
)
def test_a_proof_needs_most_pairs(ratios: list[float], proven: bool) -> None:
    assert is_proven(ratios) is proven
