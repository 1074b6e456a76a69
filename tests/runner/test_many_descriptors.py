"""The descriptors of a launcher: with high numbers, because of many ranks, and those of a failed start."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from types import ModuleType

import pytest
from launching import wait_until

from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors
from sirtaki.runner.elastic import job
from sirtaki.runner.elastic.arbiter.model import Rules
from sirtaki.runner.elastic.settings import ElasticSettings
from sirtaki.runner.launch import job as launch
from sirtaki.runner.launch import starter
from sirtaki.runner.launch.hosts import Host
from sirtaki.runner.launch.process import RankProcess
from sirtaki.runner.launch.reaper import Reaper


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


class Allowed(Exception):
    """Ends a launch that has asked for its descriptors."""


@pytest.mark.parametrize(("module", "per_rank"), [(launch, 3), (job, 4)], ids=["static", "elastic"])
@pytest.mark.parametrize("folder", [None, Path("/nowhere")], ids=["shown", "kept"])
def test_the_files_of_kept_output_are_counted(
    module: ModuleType, per_rank: int, folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has two of them in --output-filename: that many ranks would not start otherwise."""

    def allow(count: int) -> None:
        raise Allowed(count)

    monkeypatch.setattr(starter, "allow_descriptors", allow)
    settings = starter.Settings([Host("localhost", 5)], 5, ["/bin/true"], output_folder=folder)
    elastic = () if module is launch else (ElasticSettings(Rules(5, 1, 5), settings.hosts, None, None),)
    run = launch.run_job if module is launch else job.run_elastic_job
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        with pytest.raises(Allowed) as caught:
            run(settings, *elastic)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert caught.value.args == (5 * (per_rank + 2 * bool(folder)),)


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
