"""sirtaki.run for elastic jobs: the results of the workers that come to the end, by final rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from launching import pickled_by_value

import sirtaki


@pytest.fixture(autouse=True)
def functions_of_this_file_travel_by_value() -> Iterator[None]:
    with pickled_by_value(__name__):
        yield


def training(fault: str) -> tuple[int, int, int, int]:
    import sirtaki.numpy as hvd

    hvd.init()
    worker = int(os.environ["SIRTAKI_WORKER"])

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> int:
        while state.step < 10 or hvd.size() < 3:
            hvd.allreduce([1.0])
            state.step += 1
            if worker == 1 and state.step == 5:
                if fault == "raise":
                    raise ValueError("no such sample")
                os.kill(os.getpid(), signal.SIGKILL)
            state.commit()
        return int(state.step)

    steps = train(hvd.elastic.ObjectState(step=0))
    return hvd.rank(), hvd.size(), worker, steps


def test_results_are_in_the_order_of_the_last_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    results = sirtaki.run(training, args=("kill",), np=3, min_np=1, cooldown_range=(0.1, 0.1))
    assert [result[:3] for result in results] == [(0, 3, 0), (1, 3, 3), (2, 3, 2)]  # by rank, not worker
    assert len({steps for *_, steps in results}) == 1
    assert "hvdrun: rank 1 was lost: killed by signal 9 (SIGKILL)" in capfd.readouterr().err.splitlines()


def test_an_exception_ends_an_elastic_job() -> None:
    with pytest.raises(ValueError, match=r"^no such sample$") as raised:
        sirtaki.run(training, args=("raise",), np=3, min_np=1)
    assert isinstance(raised.value.__cause__, sirtaki.RemoteError)
    assert raised.value.__cause__.kind == "ValueError"


def test_a_function_that_is_not_elastic_may_run_in_an_elastic_job() -> None:
    results = sirtaki.run(lambda: int(os.environ["SIRTAKI_WORKER"]), np=2, min_np=1)
    assert results == [0, 1]
