"""The search for faster settings: which are tried, in which order, and which are kept. Has no I/O or clock.

A search asks for blocks of steps by yielding `Block`s, and is sent the time of a step in each. It compares in
pairs of blocks, one with the settings kept so far and one with a change, so that a machine that becomes
slower or faster meanwhile does so for both. Successive halving (Jamieson and Talwalkar, AISTATS 2016,
https://arxiv.org/abs/1502.07943) selects one of all changes: the half that looks better is measured again.
The selected one, or else the second best, has to prove itself in further pairs. Then the changes of the other
settings compete on top of it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

MARGIN = 0.02  # a change is kept if steps take less than 1 - MARGIN of their time
PROOF_PAIRS = 5
PROOF_WINS = 4  # of these, the pairs in which the change has to be faster
_HOPELESS = 1.05  # a change with a larger ratio does not compete again
_FINALISTS = 2  # changes that may prove themselves, one after the other, before the search ends

Settings = Mapping[str, str]


@dataclass(frozen=True)
class SettingChange:
    """A setting's other value."""

    setting: str
    value: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}"

    def of(self, settings: Settings) -> Settings:
        """Returns the settings with this change."""
        return {**settings, self.setting: self.value}


@dataclass(frozen=True)
class Block:
    """A few steps that the search wants to have measured, and why."""

    settings: Settings
    purpose: str


@dataclass(frozen=True)
class Verdict:
    """The result of a proof.

    `ratio`: the time of a step with the change, divided by that without it; `wins`: in how many pairs it was
    faster.
    """

    change: SettingChange
    ratio: float
    wins: int
    is_kept: bool


@dataclass(frozen=True)
class Judgement:
    """The bound of a change.

    Attributes:
        saving: the part of a step that it could save at most, beyond what a remaining change does.
        reason: why it is left out, as a clause; "": it is not.
    """

    change: SettingChange
    saving: float
    reason: str = ""


@dataclass
class Findings:
    """The state of a search. A search that is cut short keeps what is proven until then.

    `measured`: what the first steps have exchanged, as text; "": not known.
    """

    start: Settings
    kept: Settings
    measured: str = ""
    left_out: Sequence[Judgement] = ()
    tried: int = 0
    verdicts: list[Verdict] = field(default_factory=list)
    whole_ratio: float | None = None  # of all kept changes together
    is_finished: bool = False
    end: str = "the training ended"  # before all changes were compared

    @property
    def changes(self) -> list[SettingChange]:
        """Returns the kept changes."""
        return [SettingChange(name, value) for name, value in self.kept.items() if self.start[name] != value]


Blocks = Generator[Block, float, None]
_Ratios = list[float]


def search(findings: Findings, changes: Sequence[SettingChange]) -> Blocks:
    """Searches among changes of settings, and updates `findings`.

    It ends with the settings of the start unless those found prove themselves against these, all together.
    """
    findings.tried = len(changes)
    contenders = list(changes)
    while contenders:
        ratios = yield from _halve(findings.kept, contenders)
        best = yield from _prove(
            findings, sorted(contenders, key=lambda contender: _score(ratios[contender]))
        )
        if best is None:
            break
        contenders = [
            contender
            for contender in contenders
            if contender.setting != best.setting and median(ratios[contender]) < _HOPELESS
        ]
    if findings.changes:
        whole = yield from _compare(findings.start, findings.kept, "kept", PROOF_PAIRS)
        findings.whole_ratio = median(whole)
        if not is_proven(whole):
            findings.kept = findings.start
    findings.is_finished = True


def is_proven(ratios: Sequence[float]) -> bool:
    """Returns whether pairs of blocks show that a change makes steps faster, beyond the margin."""
    return median(ratios) < 1 - MARGIN and _wins(ratios) >= PROOF_WINS


def _wins(ratios: Sequence[float]) -> int:
    return sum(ratio < 1 for ratio in ratios)


def _score(ratios: Sequence[float]) -> tuple[int, float]:
    """Returns the rank of a change: by the rounds that it has survived, then by its ratio."""
    return -len(ratios), median(ratios)


def _prove(
    findings: Findings, ranking: Sequence[SettingChange]
) -> Generator[Block, float, SettingChange | None]:
    """Keeps the first of the best changes that proves itself, and returns it; None if there is none."""
    for change in ranking[:_FINALISTS]:
        changed = change.of(findings.kept)
        proof = yield from _compare(findings.kept, changed, f"proof {change}", PROOF_PAIRS)
        verdict = Verdict(change, median(proof), _wins(proof), is_proven(proof))
        findings.verdicts.append(verdict)
        if verdict.is_kept:
            findings.kept = changed
            return change
    return None


def _halve(
    kept: Settings, contenders: Sequence[SettingChange]
) -> Generator[Block, float, dict[SettingChange, _Ratios]]:
    """Measures all changes, then the better half of them again, and so on; returns the ratios of each."""
    ratios: dict[SettingChange, _Ratios] = {change: [] for change in contenders}
    remaining = list(contenders)
    while True:
        for change in remaining:
            ratios[change] += yield from _compare(kept, change.of(kept), f"try {change}", 1)
        if len(remaining) <= _FINALISTS:
            return ratios
        remaining.sort(key=lambda item: median(ratios[item]))
        remaining = remaining[: (len(remaining) + 1) // 2]


def _compare(usual: Settings, other: Settings, purpose: str, pairs: int) -> Generator[Block, float, _Ratios]:
    """Measures blocks in turns; returns, pair by pair, the time with `other` divided by that with `usual`."""
    ratios: _Ratios = []
    for _ in range(pairs):
        without = yield Block(usual, f"without: {purpose}")
        ratios.append((yield Block(other, purpose)) / without)
    return ratios
