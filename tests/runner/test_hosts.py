"""Hosts as users write them, and the placement of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import (
    Host,
    HostAllocation,
    allocate,
    is_this_host,
    merge_own,
    needed,
    parse_hostfile,
    parse_hosts,
    placements_of,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a:2,b:3", [Host("a", 2), Host("b", 3)]),
        (" a:2 , b ", [Host("a", 2), Host("b")]),
        ("10.0.0.2:1,gpu-01.example.org:8", [Host("10.0.0.2", 1), Host("gpu-01.example.org", 8)]),
        ("[fe80::1]:4,[fe80::2%eth0]", [Host("fe80::1", 4), Host("fe80::2%eth0")]),
        ("ada@a:2,ada@[::2]:1", [Host("ada@a", 2), Host("ada@::2", 1)]),
        ("a:2,b:1,a:3", [Host("a", 5), Host("b", 1)]),
        ("a,a", [Host("a", 2)]),
    ],
)
def test_hosts_of_the_command_line(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


WRONG = {
    "no name before or after a comma": ("", "a,,b", "a:2,"),
    "a has to have 1 to 100000 slots, not '0'": ("a:0",),
    "not '1000000'": ("a:1000000",),
    "'a:two' is not a host: write name:slots, for example hostA:4": ("a:two",),
    "'a:-1' is not a host": ("a:-1",),
    "write an IPv6 address in brackets": ("fe80::1:4",),
    "is not the name of a host": ("-oProxyCommand=evil", "--", "a;rm", "ada@-b", "a b"),
    "is not a host": ("$(id):1", "a:٣"),
}


@pytest.mark.parametrize(("text", "what"), [(text, what) for what, texts in WRONG.items() for text in texts])
def test_hosts_that_are_none(text: str, what: str) -> None:
    with pytest.raises(LaunchError) as error:
        parse_hosts(text)
    assert what in str(error.value)
    assert str(error.value).startswith("--hosts ")


HOSTFILE = """\
# our machines
hostA slots=4 max_slots=8

hostB:2          # as MPICH writes it
hostC
hostA slots = 1
[fe80::1] slots=2
"""


def test_a_hostfile_of_every_kind() -> None:
    hosts, notices = parse_hostfile(HOSTFILE, "hosts.txt")
    assert hosts == [Host("hostA", 5), Host("hostB", 2), Host("hostC"), Host("fe80::1", 2)]
    reason = "hvdrun never starts more ranks on a host than it has slots"
    assert notices == [f"hosts.txt, line 2: max_slots is ignored: {reason}"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "hosts.txt names no host"),
        ("# nothing\n", "hosts.txt names no host"),
        ("a slots=x", "hosts.txt, line 1: a has to have 1 to 100000 slots, not 'x'"),
        ("b\na slots", "hosts.txt, line 2: 'slots' is not understood"),
        ("a:2 slots=2", "hosts.txt, line 1: a has its number of slots twice"),
        ("a colour=red", "'colour=red' is not understood: a line is 'name slots=N' or 'name:N'"),
        ("^a slots=2", "'^a' is not the name of a host"),
    ],
)
def test_hostfiles_that_are_wrong(text: str, what: str) -> None:
    with pytest.raises(LaunchError) as error:
        parse_hostfile(text, "hosts.txt")
    assert what in str(error.value)


def test_the_own_machine_has_one_name() -> None:
    own = {"me", "10.0.0.1"}
    hosts = merge_own(parse_hosts("me:1,b:2,localhost:3,10.0.0.1"), lambda name: name in own | {"localhost"})
    assert hosts == [Host("localhost", 5), Host("b", 2)]


def test_which_names_mean_this_host() -> None:
    def means(name: str) -> bool:
        return is_this_host(name, ["me", "me.example.org"], lambda name: name == "10.0.0.1")

    assert all(means(name) for name in ("localhost", "127.0.0.1", "::1", "me", "me.example.org", "10.0.0.1"))
    assert not any(means(name) for name in ("other", "10.0.0.2", "ada@me", "ada@localhost"))


def test_only_hosts_that_may_be_needed_are_asked() -> None:
    hosts = [Host("a", 2), Host("b"), Host("c", 4), Host("d", 4)]
    assert needed(hosts, 2) == hosts[:1]
    assert needed(hosts, 3) == hosts[:2]
    assert needed(hosts, 4) == hosts[:3]  # b may have one slot only
    assert needed(hosts, None) == hosts
    assert needed(hosts, 100) == hosts


def test_ranks_fill_host_by_host() -> None:
    a, b, c = Host("a", 2), Host("b", 3), Host("c", 4)
    assert allocate([a, b, c], 4) == [HostAllocation(a, range(2)), HostAllocation(b, range(2, 4))]
    assert allocate([a, b, c], None) == [
        HostAllocation(a, range(2)),
        HostAllocation(b, range(2, 5)),
        HostAllocation(c, range(5, 9)),
    ]


def test_too_few_slots_are_counted() -> None:
    with pytest.raises(LaunchError, match=r"8 slots, but there are 6 \(a has 4, b has 2\): name more hosts"):
        allocate([Host("a", 4), Host("b", 2)], 8)


def test_places_on_hosts_of_different_size() -> None:
    places = placements_of(allocate([Host("a", 1), Host("b", 3), Host("c", 2)], None))
    assert [(p.rank, p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in places] == [
        (0, 0, 1, 0, 3),
        (1, 0, 3, 1, 3),
        (2, 1, 3, 0, 2),
        (3, 2, 3, 0, 1),
        (4, 0, 2, 2, 3),
        (5, 1, 2, 1, 2),
    ]
    assert {place.size for place in places} == {6}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 40))
def test_every_rank_has_one_place(slots: list[int], size: int) -> None:
    hosts = [Host(f"h{index}", count) for index, count in enumerate(slots)]
    if size > sum(slots):
        with pytest.raises(LaunchError):
            allocate(hosts, size)
        return
    shares = allocate(hosts, size)
    assert [rank for share in shares for rank in share.ranks] == list(range(size))
    assert all(len(share.ranks) <= (share.host.slots or 0) for share in shares)
    places = placements_of(shares)
    assert [place.rank for place in places] == list(range(size))
    for local_rank in range(max(slots)):
        equals = [place for place in places if place.local_rank == local_rank]
        assert [place.cross_rank for place in equals] == list(range(len(equals)))
        assert {place.cross_size for place in equals} <= {len(equals)}
