"""A launcher with so many ranks that its descriptors have high numbers."""

from __future__ import annotations

import os
import resource

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
