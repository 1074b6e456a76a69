"""The place of each rank, derived from the hosts of all ranks."""

from __future__ import annotations

import pytest

from sirtaki.runner.rendezvous.identity import RankDescription, topology_of


def member(host: str, pid: int) -> RankDescription:
    return RankDescription(host, f"name of {host}", pid, "", {})


@pytest.mark.parametrize(
    ("rank", "local", "cross"),
    [
        (0, (0, 2), (0, 3)),
        (1, (0, 3), (1, 3)),
        (2, (1, 2), (0, 2)),
        (3, (1, 3), (1, 2)),
        (4, (2, 3), (0, 1)),
        (5, (0, 1), (2, 3)),
    ],
)
def test_places_on_hosts_of_different_size(rank: int, local: tuple[int, int], cross: tuple[int, int]) -> None:
    """`cross` is the place among only those hosts that have a rank with the same local number."""
    members = [member(host, pid) for pid, host in enumerate("ababbc", 100)]
    place = topology_of(rank, members)
    assert (place.rank, place.size) == (rank, 6)
    assert (place.local_rank, place.local_size) == local
    assert (place.cross_rank, place.cross_size) == cross
    assert [peer.host_index for peer in place.peers] == [0, 1, 0, 1, 1, 2]
    assert place.peers[5].pid == 105
