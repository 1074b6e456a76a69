"""The descriptors of a launcher: with high numbers, because of many ranks, and those of a failed start."""

from __future__ import annotations

import os
import resource

import pytest
from launching import wait_until

from sirtaki.runner.process import RankProcess
from sirtaki.runner.reaper import Reaper
from sirtaki.runner.rendezvous.descriptor_limit import allow_descriptors


def test_a_rank_is_started_with_descriptors_that_select_does_not_take() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_descriptors(1024)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        with Reaper() as reaper:
            rank = RankProcess(0, ["/bin/true"], os.environ, reaper)
            assert rank.stdout > 1023
            wait_until(rank.check, "the rank has ended")
            assert (rank.exit_status and rank.exit_status.code) == 0
            rank.reap()
            os.close(rank.stdout)
            os.close(rank.stderr)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_failed_fork_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    with Reaper() as reaper:
        before = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", fork)
            for _ in range(2):
                with pytest.raises(BlockingIOError):
                    RankProcess(0, ["/bin/true"], os.environ, reaper)
        assert len(os.listdir("/proc/self/fd")) == len(before)
