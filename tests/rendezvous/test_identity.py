"""The place of each rank, derived from the hosts of all ranks."""

from __future__ import annotations

import pytest

from sirtaki.bindings.bootstrap.world_builder import (
    RankDescription,
    agree,
    describe_process,
    disagreement,
    pack,
    pack_settings,
    topology_of,
    unpack,
    unpack_settings,
)


def member(host: str, pid: int) -> RankDescription:
    return RankDescription(host, f"name of {host}", pid, "", "")


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


def test_ranks_with_equal_settings_agree() -> None:
    some, same, other = (
        unpack(pack(describe_process("", settings)))
        for settings in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "1", "b": "3"})
    )
    assert agree([some, same])
    assert not agree([some, same, other])


def test_a_description_is_as_long_with_many_settings() -> None:
    few, many = (
        len(pack(describe_process("", {f"setting {number}": "1" for number in range(count)})))
        for count in (1, 100)
    )
    assert few == many


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([{"a": "1"}, {"a": "1"}, {"a": "2"}], "the setting a is 1 on rank 0 and 2 on rank 2: set SIRTAKI_A"),
        ([{"a": "1"}, {"a": "1", "b": "2"}], "the setting b is None on rank 0 and 2 on rank 1"),
        ([{"a": "1"}, {"a": "1"}], "ranks have other settings than they have announced"),
    ],
)
def test_a_disagreement_names_the_setting(settings: list[dict[str, str]], text: str) -> None:
    sent = [unpack_settings(pack_settings(one)) for one in settings]
    assert text in str(disagreement(sent))
