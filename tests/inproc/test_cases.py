"""Every body, with ranks as threads over shared memory and over sockets."""

from __future__ import annotations

import pytest
from cases import Case, cases_for
from tiers import full_unless
from world import ENCRYPTED, TRANSPORTS, world

WORLDS = [(1, "shm"), *((size, transport) for size in (2, 3, 4) for transport in TRANSPORTS)]
FIRST = {(2, "shm"), (3, "socket")}
MOVES_DATA = ("adasum", "collectives", "objects", "process_sets", "scattering")


@pytest.mark.parametrize(
    ("size", "transport", "case"),
    [
        pytest.param(
            size,
            transport,
            case,
            id=f"{size}-{transport}-{case.name}",
            marks=full_unless((size, transport) in FIRST),
        )
        for size, transport in WORLDS
        for case in cases_for(size)
    ],
)
def test_body(size: int, transport: str, case: Case) -> None:
    with world(size, transport) as ranks:
        ranks.run(case.body)


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases_for(3, MOVES_DATA)])
def test_body_over_encrypted_links(case: Case) -> None:
    with world(3, ENCRYPTED) as ranks:
        ranks.run(case.body)
