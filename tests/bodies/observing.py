"""What a rank says of what it has done."""

from __future__ import annotations

import time

import numpy as np
import pytest

import sirtaki.numpy as hvd
from bodies import case


@case()
def statistics_count_what_was_done() -> None:
    before = hvd.stats()
    assert (before["rank"], before["size"]) == (hvd.rank(), hvd.size())
    for _ in range(3):
        hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    hvd.broadcast(np.ones(10, np.float64), 0, name="weights")
    hvd.barrier()
    after = hvd.stats()
    assert after["operations"] - before["operations"] == 5
    assert after["plans"] - before["plans"] == 5
    assert after["bytes"] - before["bytes"] == 3 * 4000 + 80
    assert after["cache_hits"] - before["cache_hits"] == 2
    assert after["cache_misses"] - before["cache_misses"] == 3
    assert after["failed"] == before["failed"]
    assert after["tensors_per_plan"] == {"mean": 1.0, "max": 1}


@case()
def statistics_count_what_was_fused() -> None:
    handles = [hvd.allreduce_async(np.ones(5), name=f"gradient {index}") for index in range(20)]
    for handle in handles:
        handle.wait()
    counted = hvd.stats()
    assert counted["operations"] == 20
    assert 1 <= counted["plans"] <= 20
    assert counted["tensors_per_plan"]["mean"] == 20 / counted["plans"]
    assert counted["tensors_per_plan"]["max"] >= 20 / counted["plans"]


@case(least=2)
def statistics_count_failures() -> None:
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(np.ones(hvd.rank() + 1), name="uneven")
    assert hvd.stats()["failed"] == 1


@case(least=2)
def statistics_name_the_late_rank_on_all_ranks() -> None:
    late, pause = hvd.size() - 1, 0.6
    for _ in range(2):
        hvd.barrier()
        if hvd.rank() == late:
            time.sleep(pause)
        hvd.allreduce(1.0, name="loss")
    counted = hvd.stats()
    lateness = hvd.allgather_object(counted["lateness"])
    assert all(told == lateness[0] for told in lateness)
    assert len(lateness[0]) == hvd.size()
    assert lateness[0][late]["times"] >= 2
    assert lateness[0][late]["max_seconds"] > pause / 2
    assert 0 < lateness[0][late]["mean_seconds"] <= lateness[0][late]["max_seconds"]
    if hvd.rank() != late:
        assert counted["waiting_seconds"] > pause


@case()
def statistics_measure_the_bandwidth_of_what_moved() -> None:
    hvd.allreduce(np.ones(1 << 20, np.float32), name="weights")
    counted = hvd.stats()
    assert counted["moving_seconds"] >= 0
    assert (counted["busbw"] > 0) == (hvd.size() > 1 and counted["moving_seconds"] > 0)
