"""The soft limit of descriptors, which is raised as far as many ranks need it."""

from __future__ import annotations

import os
import resource

import pytest

from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "count", "after"),
    [
        ((1024, 4096), 100, None),
        ((1024, 4096), 2000, (2000, 4096)),
        ((1024, 4096), 5000, (4096, 4096)),
        ((1024, 1024), 5000, (1024, 1024)),
        ((1024, UNLIMITED), 5000, (5000, UNLIMITED)),
        ((UNLIMITED, UNLIMITED), 5000, None),
    ],
)
def test_the_limit_is_raised_up_to_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], count: int, after: tuple[int, int] | None
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    others = len(os.listdir("/proc/self/fd")) + 256 + 50  # other tests' threads may open some meanwhile
    allow_descriptors(count)
    if after is None:
        assert calls == []
    else:
        soft, hard = calls[0]
        assert hard == after[1]
        assert soft == after[0] if after[0] == hard else count + 256 <= soft <= count + others
