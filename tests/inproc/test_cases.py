"""Every body, with ranks as threads over shared memory and over sockets."""

from __future__ import annotations

import pytest
from cases import Case, cases_for
from tiers import in_worlds
from world import ENCRYPTED, TRANSPORTS, world

WORLDS = [(1, "shm"), *((size, transport) for size in (2, 3, 4) for transport in TRANSPORTS)]
MAIN = {(2, "shm"), (3, "socket")}
MOVES_DATA = ("adasum", "collectives", "objects", "process_sets", "scattering")


@pytest.mark.parametrize(("size", "transport", "case"), in_worlds(WORLDS, MAIN))
def test_body(size: int, transport: str, case: Case) -> None:
    with world(size, transport) as ranks:
        ranks.run(case.body)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases_for(3, MOVES_DATA)])
def test_body_over_encrypted_links(case: Case) -> None:
    with world(3, ENCRYPTED) as ranks:
        ranks.run(case.body)
