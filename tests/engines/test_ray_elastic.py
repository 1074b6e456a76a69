"""The elastic RayExecutor, with the real Ray on one node: actors are lost, and others take their places."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import sirtaki
import sirtaki.numpy as hvd

pytestmark = pytest.mark.usefixtures("ray_cluster")


def train(fault: str) -> tuple[int, int, int, int, int, float]:
    """Adds up the numbers of steps; worker 1 fails in step 5. Ends when two ranks have trained again."""
    hvd.init()
    worker, first_pid = int(os.environ["SIRTAKI_WORKER"]), os.getpid()

    @hvd.elastic.run
    def run(state: Any) -> float:
        while state.step < 10 or hvd.size() < 2:
            if fault != "none" and worker == 1 and state.step == 5:
                if fault == "raise":
                    raise ZeroDivisionError("no such sample")
                os.kill(os.getpid(), signal.SIGKILL)
            part = float(state.step) / hvd.size()
            added = float(hvd.allreduce([part], op=hvd.Sum)[0])
            state.total += added
            state.step += 1
            state.commit()
        return float(state.total)

    state = hvd.elastic.ObjectState(step=0, total=0.0)
    total = run(state)
    assert os.getpid() == first_pid
    return hvd.rank(), hvd.size(), worker, os.getpid(), int(state.step), total


def executor(**arguments: Any) -> Any:
    from sirtaki.ray import RayExecutor

    made = RayExecutor(cpus_per_worker=1, cooldown_range=(0.1, 0.1), **arguments)
    made.start()
    return made


def test_a_lost_actor_is_replaced_and_the_others_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    made = executor(min_workers=1, num_workers=2)
    results = made.run(train, args=("kill",))
    assert [result[:3] for result in results] == [(0, 2, 0), (1, 2, 2)]  # by rank, not by worker
    assert results[0][3] != results[1][3]
    assert len({result[4] for result in results}) == 1
    steps = results[0][4]
    assert all(result[5] == pytest.approx(sum(range(steps)), rel=1e-12) for result in results)
    said = capfd.readouterr().err
    assert "sirtaki: rank 1 was lost: Ray has lost its actor: " in said
    assert "from commit 5 on: rank 1 was lost" in said
    again = made.execute(
        lambda executable: (executable, *train("none"))
    )  # another call has actors of its own
    assert [result[:4] for result in again] == [(None, 0, 2, 0), (None, 1, 2, 1)]
    made.shutdown()
    with pytest.raises(sirtaki.RunError, match="has no actors"):
        made.run(train, args=("kill",))


def test_ranks_join_up_to_the_maximum() -> None:
    results = executor(min_workers=1, max_workers=2).run(train, args=("none",))
    assert [result[:3] for result in results] == [(0, 2, 0), (1, 2, 1)]
    steps = results[0][4]
    assert [result[4:] for result in results] == [(steps, pytest.approx(sum(range(steps)), rel=1e-12))] * 2


def test_an_exception_ends_the_call() -> None:
    with pytest.raises(ZeroDivisionError, match=r"^no such sample$") as raised:
        executor(min_workers=1, num_workers=2).run(train, args=("raise",))
    assert isinstance(raised.value.__cause__, sirtaki.RemoteError)
    assert raised.value.__cause__.rank == 1


def test_the_reset_limit_ends_the_call() -> None:
    with pytest.raises(sirtaki.RunError, match=r"^1 rank was lost, and reset_limit allows 0"):
        executor(min_workers=1, num_workers=2, reset_limit=0).run(train, args=("kill",))


def test_too_few_ranks_end_the_call() -> None:
    text = r"^3 ranks are needed, and [0-2] were there after 6 s \(Ray has"  # which may start actors later
    with pytest.raises(sirtaki.RunError, match=text):
        executor(min_workers=3, elastic_timeout=6).run(train, args=("kill",))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_workers": 2}, "an elastic executor needs min_workers"),
        ({"min_workers": 3, "num_workers": 2}, "from min_workers"),
        ({"min_workers": 1, "max_workers": 2, "num_workers": 4}, "max_workers"),
        ({"min_workers": 1, "num_hosts": 2}, "takes no num_hosts"),
        ({"min_workers": 1, "cooldown_range": (2, 1)}, "the shorter pause first"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    from sirtaki.ray import RayExecutor

    with pytest.raises(ValueError, match=text):
        RayExecutor(**arguments)


def test_calls_that_actors_which_change_cannot_serve() -> None:
    made = executor(min_workers=1)
    with pytest.raises(ValueError, match="has no run_remote"):
        made.run_remote(train)
    with pytest.raises(ValueError, match="has no execute_single"):
        made.execute_single(train)
