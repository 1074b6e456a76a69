"""The divisor of an average while ranks have joined: a setting."""

from __future__ import annotations

import numpy as np
import pytest
from world import TRANSPORTS, world

import sirtaki.numpy as hvd


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("setting", "divisors"), [("all", [3, 3, 3]), ("contributors", [3, 2, 1])])
def test_an_average_divides_by_all_or_by_those_that_contribute(
    transport: str, setting: str, divisors: list[int]
) -> None:
    def body() -> None:
        for step in range(hvd.rank() + 1):  # rank r takes r + 1 steps
            contributors = range(step, 3)
            expected = sum(12 * (rank + 1) for rank in contributors) / divisors[step]
            whole = np.full(6, 12.0 * (hvd.rank() + 1))
            np.testing.assert_array_equal(hvd.allreduce(whole), np.full(6, expected))
            np.testing.assert_array_equal(hvd.reducescatter(whole), np.full(2, expected))
        assert hvd.join() == 2

    with world(3, transport, join_average=setting) as ranks:
        ranks.run(body)
