"""A rank's own records: statistics and timelines."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from timelines import read_trace, slices_named

import sirtaki.numpy as hvd
from cases import case
from sirtaki.bindings.context import current
from sirtaki.bindings.observing import observe


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


@case()
def statistics_count_kinds_and_backends() -> None:
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    hvd.broadcast(np.ones(10, np.float64), 0, name="weights")
    hvd.barrier()
    counted = hvd.stats()
    rows = {(row["kind"], row["operations"], row["failed"], row["bytes"]) for row in counted["by_backend"]}
    assert rows == {("all-reduce", 1, 0, 4000), ("broadcast", 1, 0, 80), ("barrier", 1, 0, 0)}
    backends = {row["backend"] for row in counted["by_backend"] if row["kind"] != "barrier"}
    assert backends <= {"shared memory", "links", "hierarchical"} if hvd.size() > 1 else {"single rank"}
    assert [row["backend"] for row in counted["by_backend"] if row["kind"] == "barrier"] == ["none"]
    ways = {(row["kind"], row["backend"]): row["algorithm"] for row in counted["by_backend"]}
    algorithms = {"shared memory": {"whole"}, "links": {"direct", "ring", "recursive_doubling"}}
    assert all(
        algorithm in (algorithms.get(backend, {""}) if kind == "all-reduce" else {""})
        for (kind, backend), algorithm in ways.items()
    )
    assert all(row["bytes"] > 0 for row in counted["sent"])
    assert bool(counted["sent"]) == (hvd.size() > 1)


@case(least=2)
def failed_operations_have_no_backend() -> None:
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(np.ones(hvd.rank() + 1), name="uneven")
    assert hvd.stats()["by_backend"] == [
        {"kind": "all-reduce", "backend": "none", "operations": 1, "failed": 1, "bytes": 0, "algorithm": ""}
    ]


@case()
def the_slowest_tensors_are_those_for_which_the_program_waited() -> None:
    context = current()
    hvd.allreduce(np.ones(10, np.float32), name="before")
    hvd.barrier()
    (before,) = observe.slowest_tensors(context, 10)
    assert (before["name"], before["operations"], before["exposed_seconds"]) == ("before", 1, None)
    for _ in range(3):
        with context.steps.exposed:
            hvd.allreduce(np.ones(10, np.float32), name="waited for")
    (found,) = observe.slowest_tensors(context, 10)  # what came before the first wait is left out
    assert (found["name"], found["operations"]) == ("waited for", 3)
    total = found["wait_seconds"] + found["transfer_seconds"]
    assert found["exposed_seconds"] == pytest.approx(total, abs=1e-6)
    assert observe.slowest_tensors(context, 0) == []


@case()
def statistics_count_how_long_operations_waited_and_took() -> None:
    before = hvd.stats()
    for _ in range(3):
        hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    after = hvd.stats()
    for key in ("wait", "transfer"):
        first, last = before[key], after[key]
        assert len(last["counts"]) == len(last["bounds"]) + 1
        assert last["bounds"] == sorted(last["bounds"])
        grown = [new - old for old, new in zip(first["counts"], last["counts"], strict=True)]
        assert sum(grown) == 3
        assert min(grown) >= 0
        assert last["total_seconds"] >= first["total_seconds"]


@case(least=2)
def durations_tell_the_late_rank_from_those_that_waited() -> None:
    late, pause = hvd.size() - 1, 1.0
    hvd.barrier()
    if hvd.rank() == late:
        time.sleep(pause)
    hvd.allreduce(1.0, name="loss")
    wait = hvd.stats()["wait"]
    in_long_ranges = sum(wait["counts"][wait["bounds"].index(0.1) + 1 :])
    if hvd.rank() != late:
        assert in_long_ranges >= 1
        assert wait["total_seconds"] > pause / 2


@case(least=2)
def an_activity_is_that_of_the_oldest_operation() -> None:
    context = current()
    assert observe.activity(context)["operations"] == 0
    hvd.barrier()
    if hvd.rank() == 0:
        handles = [hvd.allreduce_async(np.ones(3), name=f"{name} gradient") for name in ("first", "second")]
        time.sleep(0.01)
        found = observe.activity(context)
        assert (found["operations"], found["name"], found["kind"]) == (2, "first gradient", "all-reduce")
        assert not found["is_agreed"]
        assert 0.005 < found["seconds"] < 1000
    hvd.barrier()
    if hvd.rank() != 0:
        handles = [hvd.allreduce_async(np.ones(3), name=f"{name} gradient") for name in ("first", "second")]
    for handle in handles:
        handle.wait()
    assert observe.activity(context) == {
        "operations": 0,
        "name": "",
        "kind": "",
        "process_set": 0,
        "is_agreed": False,
        "seconds": 0.0,
    }


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


@case()
def a_timeline_shows_what_was_done_between_start_and_stop() -> None:
    hvd.stop_timeline()  # has no effect yet
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        mine = path if hvd.rank() == 0 else path.with_name(f"timeline.json.rank{hvd.rank()}")
        hvd.allreduce(np.ones(10), name="before")
        hvd.start_timeline(path, mark_cycles=True)
        for _ in range(3):
            hvd.allreduce(np.ones(300_000, np.float32), name="gradient")
        hvd.allreduce(np.ones(10), name="bias")
        hvd.barrier()
        hvd.stop_timeline()
        hvd.allreduce(np.ones(10), name="after")
        events = read_trace(mine)
    names = slices_named(events, "gradient")
    assert names.count("all-reduce") == 3
    assert names[0] == "all-reduce"
    if hvd.rank() != 0:  # rank 0, the coordinator, may decide at the moment of its own request
        assert names[1] == "NEGOTIATE"
    if hvd.size() > 1:
        assert names.count("TRANSFER") == names.count("UNPACK") == 3
        assert names.count("PACK") in (0, 3)  # a socket sends large tensors directly from their memory
        of_bias = [name for name in slices_named(events, "bias") if name != "NEGOTIATE"]
        assert of_bias == ["all-reduce", "PACK", "TRANSFER", "UNPACK"]
    assert not slices_named(events, "before") + slices_named(events, "after")
    assert sum(event["name"] == "DECISION" for event in events) >= 4
    assert {event["pid"] for event in events} == {hvd.rank()}
    (first, *_) = [event for event in events if event["name"] == "all-reduce"]
    assert (first["args"]["bytes"], first["args"]["status"]) == (1_200_000, "ok")


@case()
def a_second_timeline_ends_the_first() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("first", "second")]
        for path in paths:
            hvd.start_timeline(path)
            hvd.allreduce(np.ones(10), name=path.name)
        hvd.stop_timeline()
        hvd.stop_timeline()
        suffix = f".rank{hvd.rank()}" if hvd.rank() else ""
        for path in paths:
            events = read_trace(path.with_name(path.name + suffix))
            assert slices_named(events, path.name)[0] == "all-reduce"
            assert not any(event["name"] == "DECISION" for event in events)


@case()
def a_timeline_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(OSError, match=r"/no/such/folder/x.*No such file"):
        hvd.start_timeline("/no/such/folder/x")
    hvd.allreduce(1.0)
