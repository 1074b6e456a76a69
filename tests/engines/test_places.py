"""Ranks of an engine's processes by host, outcomes of ranks, and versions of engines, without an engine."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import Any

import pytest

import sirtaki
from sirtaki.bindings.bootstrap.providers import find_world
from sirtaki.bindings.bootstrap.providers.world import assign
from sirtaki.runner.engines.outcomes import RankOutcome, results_of, with_variables
from sirtaki.runner.engines.places import EngineJob, ranks_by_host
from sirtaki.runner.function.report import RETURNED, report_of


def failed(rank: int, error: Exception, is_caused_elsewhere: bool = False) -> RankOutcome:
    report = report_of(error, "raised")
    return RankOutcome(rank, "hostA", 100 + rank, report, pickle.dumps(error), is_caused_elsewhere)


def returned(rank: int, value: Any) -> RankOutcome:
    return RankOutcome(rank, "hostA", 100 + rank, RETURNED, pickle.dumps(value))


def test_ranks_of_a_host_are_contiguous() -> None:
    assert ranks_by_host(["b", "a", "b", "c", "a", "b"]) == [0, 3, 1, 5, 4, 2]
    assert ranks_by_host(["a", "a"]) == [0, 1]


def test_results_come_by_rank() -> None:
    assert results_of([returned(1, "second"), returned(0, "first")]) == ["first", "second"]


def test_the_culprit_is_raised_and_not_its_victims() -> None:
    victim, culprit = failed(0, RuntimeError("rank 1 failed"), True), failed(1, KeyError("bad batch"))
    with pytest.raises(KeyError, match="bad batch") as raised:
        results_of([victim, returned(2, None), culprit], lost="the job has ended")
    assert isinstance(raised.value.__cause__, sirtaki.RemoteError)
    assert (raised.value.__cause__.rank, raised.value.__cause__.pid) == (1, 101)


def test_a_lost_process_is_named_with_its_victims() -> None:
    victim = failed(0, RuntimeError("rank 1 is gone"), True)
    with pytest.raises(
        sirtaki.RunError, match=r"^it was killed\nrank 0 raised RuntimeError: rank 1 is gone$"
    ):
        results_of([victim], lost="it was killed")
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        results_of([victim])


def test_the_key_of_a_job_is_not_shown() -> None:
    job = EngineJob.create("spark", 2, 10.0)
    assert len(job.key) == 32
    assert job.key != EngineJob.create("spark", 2, 10.0).key
    assert "key" not in repr(job)
    assert "key" not in repr(job.world(0, "127.0.0.1:1"))


def test_an_assigned_world_comes_first() -> None:
    job = EngineJob.create("spark", 2, 10.0)
    assign(job.world(1, "unix:@nobody"))
    try:
        world = find_world(environment={"SIRTAKI_RANK": "5"})
        assert (world.rank, world.job.size, world.address, world.serves) == (1, 2, "unix:@nobody", False)
    finally:
        assign(None)
    assert find_world(environment={}).job.size == 1


def test_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("SIRTAKI_TEST_OLD", "before")
    with with_variables({"SIRTAKI_TEST_OLD": "now", "SIRTAKI_TEST_NEW": "now"}):
        assert os.environ["SIRTAKI_TEST_OLD"] == os.environ["SIRTAKI_TEST_NEW"] == "now"
    assert os.environ["SIRTAKI_TEST_OLD"] == "before"
    assert "SIRTAKI_TEST_NEW" not in os.environ


@pytest.mark.parametrize(
    ("engine", "package"),
    [("spark", "pyspark"), ("ray", "ray")],
)
def test_an_engine_that_is_missing_or_of_another_version(
    engine: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"sirtaki.{engine}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'sirtaki\[{engine}\]'"):
        __import__(f"sirtaki.{engine}")
    old = ModuleType(package)
    old.__version__ = "1.2.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, old)
    with pytest.raises(ImportError, match=rf"\(tested: [0-9.]+\), and this is {package} 1\.2\.3"):
        __import__(f"sirtaki.{engine}")
