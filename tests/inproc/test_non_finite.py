"""The first infinity or NaN that a rank adds to a sum: its rank is named before the sum spreads the value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from world import TRANSPORTS, world

import sirtaki.numpy as hvd
from sirtaki.bindings.context import current
from sirtaki.common.exceptions import NotFiniteError

NAMED = r"sirtaki: rank {} \(pid \d+ on testhost\) adds {} to the sum of '{}' over {} ranks"


def lines_of(
    capfd: pytest.CaptureFixture[str], body: Callable[[], None], size: int, *how: str, **settings: str
) -> list[str]:
    with world(size, *how, **settings) as ranks:
        ranks.run(body)
    return capfd.readouterr().err.splitlines()


def steps_with_a(value: float, culprit: int) -> Callable[[], None]:
    """Returns a training that goes wrong in the second step on one rank, and then on all ranks."""

    def body() -> None:
        for step in range(4):
            tensors = [np.full(count, 1.0, np.float32) for count in (40, 30_000, 3)]
            if step > 1 or (step == 1 and hvd.rank() == culprit):
                tensors[1][-5 if step == 1 else 0 :] = value
            hvd.grouped_allreduce(tensors, name="gradient")
            current().steps.end()

    return body


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (2, 1), (3, 1), (5, 4)])
@pytest.mark.parametrize(("value", "what"), [(np.nan, "a NaN"), (-np.inf, "an infinite value")])
def test_the_rank_with_the_first_value_is_named(
    capfd: pytest.CaptureFixture[str], transport: str, size: int, culprit: int, value: float, what: str
) -> None:
    lines = lines_of(capfd, steps_with_a(value, culprit), size, transport)
    expected = NAMED.format(culprit, what, r"gradient\S*1", size) + ", after 1 training steps"
    assert re.match(expected, next(line for line in lines if f"rank {culprit} " in line)), lines
    # A rank that sees only a part of the sum does not learn of a value elsewhere in the tensor.
    assert len(lines) == 1 or transport == "socket" or size > 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_value_in_whole_tensors_is_reported_once(
    capfd: pytest.CaptureFixture[str], transport: str, size: int
) -> None:
    def body() -> None:
        for step in range(3):
            bad = step > 1 or (step == 1 and hvd.rank() == 1)
            hvd.allreduce(np.full(50_000, np.nan if bad else 1.0, np.float32), name="gradient")

    (line,) = lines_of(capfd, body, size, transport)
    assert re.match(NAMED.format(1, "a NaN", "gradient", size) + r"\. The sum carries it", line)
    assert line.endswith("SIRTAKI_NON_FINITE=stop ends the job at such a value, off is silent")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_job_that_stops_at_such_a_value(
    capfd: pytest.CaptureFixture[str], transport: str, size: int
) -> None:
    """No rank gets a result that contains the value."""

    def body() -> None:
        hvd.allreduce(np.ones(5), name="before")
        loss = np.full(3000, np.inf if hvd.rank() == size - 1 else 1.0)
        with pytest.raises(
            NotFiniteError, match=rf"rank {size - 1} .* adds an infinite value to the sum of 'loss'"
        ):
            hvd.allreduce(loss, name="loss")

    assert not lines_of(capfd, body, size, transport, non_finite="stop")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("call", ["allreduce", "reducescatter"])
def test_every_dtype_and_reduction_of_sums(
    capfd: pytest.CaptureFixture[str], size: int, dtype: str, call: str
) -> None:
    def body(value: float = np.nan) -> None:
        data = np.ones(5000, dtype)
        data[-1] = value if hvd.rank() == 0 else 1
        getattr(hvd, call)(data, op=hvd.Sum, name="x")

    (line,) = lines_of(capfd, body, size)
    assert "rank 0 (" in line
    assert "adds a NaN to the sum of 'x'" in line
    assert not lines_of(capfd, lambda: body(1000.0), size)


def test_what_is_not_looked_at(capfd: pytest.CaptureFixture[str]) -> None:
    """Minima and maxima may be infinite, and copies change no parameters of other ranks."""
    bad = np.array([np.nan, np.inf, 1.0])

    def others() -> None:
        hvd.allreduce(bad, op=hvd.Min)
        hvd.allreduce(bad, op=hvd.Max)
        hvd.allgather(bad)
        hvd.broadcast(bad, 0)
        hvd.allreduce(np.array([-1], np.int32), op=hvd.Sum)

    def a_sum() -> None:
        hvd.allreduce(bad)

    assert not lines_of(capfd, others, 2)
    assert not lines_of(capfd, a_sum, 2, non_finite="off")
    assert not lines_of(capfd, a_sum, 1)


def test_a_sum_that_is_too_large_names_no_rank(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        result: Any = hvd.allreduce(np.full(100, 3e38, np.float32), op=hvd.Sum)
        assert np.isinf(result).all()

    assert not lines_of(capfd, body, 2)
