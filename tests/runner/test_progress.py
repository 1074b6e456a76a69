"""Reports about awaited ranks: refreshed on a terminal, at doubling intervals elsewhere."""

from __future__ import annotations

import pytest

from sirtaki.bindings.bootstrap.job import join_names
from sirtaki.runner.supervise import display
from sirtaki.runner.supervise.display import FIRST_REFRESH_SECONDS, FIRST_REPEAT_SECONDS, Progress

NAMES = {0: "rank 0", 1: "rank 1 (hostB)", 2: "rank 2 (hostB)"}


class Clock:
    """A replacement for the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(display, "time", clock)
    return clock


def pass_time(waiting: Progress, clock: Clock, until: float) -> None:
    """Advances the clock to each deadline up to `until`."""
    while waiting.due is not None and waiting.due <= until:
        clock.now = waiting.due
        waiting.poll(clock.now)
    clock.now = until


def test_the_line_is_repeated_at_doubling_times(clock: Clock) -> None:
    shown: list[str] = []
    waiting = Progress("ranks are here", NAMES, shown.append, refreshes=False)
    assert waiting.due is None
    waiting.note(0)
    waiting.begin()
    pass_time(waiting, clock, 100 + FIRST_REPEAT_SECONDS - 0.1)
    assert shown == []
    pass_time(waiting, clock, 100 + FIRST_REPEAT_SECONDS * 3)
    assert shown == ["1 of 3 ranks are here; waiting for rank 1 (hostB) and rank 2 (hostB)"] * 2
    waiting.note(2)
    pass_time(waiting, clock, 100 + FIRST_REPEAT_SECONDS * 7)
    assert shown[2:] == ["2 of 3 ranks are here; waiting for rank 1 (hostB)"]
    waiting.note(1)
    assert waiting.due is None
    assert len(shown) == 3


def test_a_terminal_is_refreshed_and_cleared(clock: Clock) -> None:
    shown: list[str] = []
    waiting = Progress("ranks are here", NAMES, shown.append, refreshes=True)
    waiting.begin()
    pass_time(waiting, clock, 100 + FIRST_REFRESH_SECONDS)
    waiting.note(1)
    waiting.note(1)
    waiting.note(0)
    waiting.note(2)
    assert [line[:6] for line in shown] == ["0 of 3", "1 of 3", "2 of 3", ""]


def test_what_is_quick_needs_no_line(clock: Clock) -> None:
    shown: list[str] = []
    for refreshes in (False, True):
        waiting = Progress("ranks are here", NAMES, shown.append, refreshes)
        waiting.begin()
        for rank in NAMES:
            waiting.note(rank)
        pass_time(waiting, clock, 1000)
    assert shown == []


def test_names() -> None:
    assert join_names(["a"]) == "a"
    assert join_names("abcd") == "a, b, c and d"
    assert join_names("abcdef") == "a, b, c and 3 more"
