"""How actors of Ray are taken as lost: by Ray's own exceptions, without a cluster."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from sirtaki.runner.elastic.arbiter.model import Slot
from sirtaki.runner.engines.outcomes import RankOutcome
from sirtaki.runner.function.errors import RunError
from sirtaki.runner.function.report import RETURNED

LOSSES = ["OutOfMemoryError", "RayActorError", "ActorUnschedulableError", "RuntimeEnvSetupError"]
RETURNED_BY_RANK_0 = RankOutcome(0, "hostA", 70, RETURNED, b"")
TEXT = "2 workers were killed due to the node running low on memory"


def loss(name: str) -> Exception:
    from ray import exceptions

    if name == "RayTaskError":
        return exceptions.RayTaskError("work", f"Traceback: {TEXT}", ValueError(TEXT))
    made = getattr(exceptions, name)
    return made(error_msg=TEXT) if name == "RayActorError" else made(TEXT)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a group of two actors. The reference of a call that fails is its error."""
    import ray

    from sirtaki.ray import executor as module

    def get(reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return RETURNED_BY_RANK_0

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references[:1], references[1:]))
    made = module.RankGroup(None, None, False, {})  # type: ignore[arg-type]
    made._ranks = [module._Rank(None, f"actor{rank}", "", "hostA", 70 + rank) for rank in range(2)]
    return made


@pytest.mark.parametrize("name", LOSSES)
def test_a_group_names_the_rank_whose_actor_was_lost(group: Any, name: str) -> None:
    assert group._wait_for({"returned": 0, loss(name): 1}) == [RETURNED_BY_RANK_0]
    assert group._lost.startswith("rank 1 (actor actor1, pid 71 on hostA) was lost: ")
    assert TEXT in group._lost


@pytest.mark.parametrize("name", LOSSES)
def test_an_actor_that_is_lost_at_the_start_is_named(group: Any, name: str) -> None:
    with pytest.raises(RunError, match=rf"rank 1 \(actor actor1, .*\) was lost: (.|\n)*{TEXT}"):
        group._get(["ready", loss(name)], 1.0)


def test_an_error_of_the_actors_own_code_is_no_loss(group: Any) -> None:
    from ray.exceptions import RayTaskError

    for call in (
        lambda: group._wait_for({loss("RayTaskError"): 1}),
        lambda: group._get([loss("RayTaskError")], 1.0),
    ):
        with pytest.raises(RayTaskError):
            call()
    assert group._lost == ""


@pytest.mark.parametrize(
    ("name", "killed_by"),
    [
        ("OutOfMemoryError", signal.SIGKILL),
        ("RayActorError", signal.SIGKILL),
        ("ActorUnschedulableError", signal.SIGKILL),
        ("RuntimeEnvSetupError", 0),  # another actor would fail alike
        ("RayTaskError", 0),
    ],
)
def test_an_elastic_job_replaces_an_actor_that_was_lost(name: str, killed_by: int) -> None:
    from sirtaki.ray.elastic import ActorJob, _Worker

    job = ActorJob.__new__(ActorJob)
    job._places = SimpleNamespace(strategy=lambda slot: slot)  # type: ignore[assignment]
    outcome: Future[RankOutcome] = Future()
    outcome.set_exception(loss(name))
    end = job._end_of(1, _Worker(None, Slot("hostA", 0), outcome), 1.0)
    assert (end.code, end.killed_by, end.keeps_slot) == (0 if killed_by else 1, killed_by, True)
    assert end.why.startswith("Ray has lost its actor: ")
    assert TEXT in end.why
