"""Rank 0 of a world with autotune, on a clock that only the settings in use drive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.common.autotune import tuner
from sirtaki.common.autotune.model import Counts, TunedJob
from sirtaki.common.autotune.tuner import Tuner

START = {
    "hand_over": "auto",
    "chunk_bytes": "4096",
    "fusion_threshold": "67108864",
    "report_bytes": "1048576",
    "report_window": "0.0003",
    "spin": "0.0002",
}


TORCH, EAGER = Stepper("gradient", hands_over=True), Stepper("gradients")


@dataclass(eq=False)
class Counters:
    """The steps of a world: those of Python, and those that end in compiled programs of one optimizer."""

    listener: Callable[[Stepper], None] | None = None
    count: int = 0
    optimizer: int = 0
    compiled: int = 0
    others: int = 0  # since the last one of the optimizer
    latest: list[float] = field(default_factory=lambda: [0.0] * 15)

    def end(self, number: int = 1, by: Stepper | None = None) -> None:
        if by is not None and self.listener is not None:
            self.listener(by)
        self.count += number
        self.others += number
        if self.others >= 1000:
            self.optimizer = self.compiled = 0

    def end_compiled(self, seconds: float, by: int) -> None:
        self.compiled = self.compiled + 1 if by == self.optimizer else 1
        self.optimizer, self.others = by, 0
        self.count += 1
        self.latest = [*self.latest[1:], seconds]

    def read(self) -> SimpleNamespace:
        return SimpleNamespace(
            number=self.count, optimizer=self.optimizer, optimizer_steps=self.compiled, latest=self.latest
        )


@dataclass(eq=False)
class World:
    """Rank 0 of a world in which only large chunks, and late hand-over, are fast.

    Each step exchanges `bytes` in a plan that moves for `moving` seconds; without any, nothing is known of
    it. The program computes for `pause` seconds more.
    """

    log: str = ""
    rank: int = 0
    size: int = 2
    autotune: str = "1"
    survivors: Any = None
    in_use: dict[str, str] = field(default_factory=lambda: dict(START))
    shutdown_callbacks: list[Any] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    time: float = 0.0
    taken: int = 0
    pause: float = 0.0
    bytes: int = 0
    moving: float = 0.001
    job: TunedJob | None = field(default_factory=lambda: TunedJob(1))

    @property
    def steps(self) -> Counters:
        return self.counters

    def setting(self, name: str) -> str:
        return {"autotune": self.autotune, "autotune_log": self.log, "chunk_bytes": "0"}[name]

    def step(self, optimizer: Stepper = TORCH) -> None:
        """Takes a step; every tenth one includes an evaluation."""
        self._compute()
        self.counters.end(by=optimizer)

    def step_compiled(self, by: int = 7) -> None:
        """Works like `step`, inside a compiled program. `by`: the optimizer that the core measures now."""
        before = self.time
        self._compute()
        self.counters.end_compiled(self.time - before, by)

    def _compute(self) -> None:
        self.taken += 1
        self.time += 0.010 if self.in_use["chunk_bytes"] == "4096" else 0.004
        self.time += 0.002 if self.in_use["hand_over"] != "late" else 0
        self.time += self.pause
        self.time += 1.0 if self.taken % 10 == 0 else 0

    def counts(self) -> Counts:
        """Returns counters that begin with those of other operations."""
        steps, plans = self.counters.count, self.taken if self.bytes else 0
        routes = {("broadcast", "shared memory"): 7, ("all-reduce", "shared memory"): 3 * plans}
        moved = 5.0 + self.moving * plans
        return Counts(steps, 9 + 3 * plans, 1, 8 + plans, 999 + self.bytes * plans, 2.0, moved, None, routes)

    def clock(self) -> float:
        return self.time


def replace_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes autotune use the settings and the counters of a `World`, in place of the core's."""
    monkeypatch.setattr(tuner, "setting_in_use", lambda context, name: context.in_use[name])
    monkeypatch.setattr(
        tuner, "change_setting", lambda context, name, value: context.in_use.update({name: value})
    )
    monkeypatch.setattr(tuner, "read", lambda context: context.counts())
    monkeypatch.setattr(tuner, "job_of", lambda context, optimizer: context.job)


def make(world: World) -> Tuner:
    return Tuner(world, world.clock)  # type: ignore[arg-type]
