"""Every body, with ranks as threads over shared memory and over sockets."""

from __future__ import annotations

import pytest
from bodies import Case, cases_for
from world import TRANSPORTS, world

WORLDS = [(1, "shm"), *((size, transport) for size in (2, 3, 4) for transport in TRANSPORTS)]


@pytest.mark.parametrize(
    ("size", "transport", "case"),
    [
        pytest.param(size, transport, case, id=f"{size}-{transport}-{case.name}")
        for size, transport in WORLDS
        for case in cases_for(size)
    ],
)
def test_body(size: int, transport: str, case: Case) -> None:
    with world(size, transport) as ranks:
        ranks.run(case.body)
