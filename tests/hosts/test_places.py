"""Ranks of several hosts find each other without a launcher, and agree on each rank's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from .network import Host, Network, finish, places, python

WHERE = """
import numpy as np, sirtaki.numpy as hvd
hvd.init()
places = hvd.allgather_object((hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()))
total = hvd.allreduce(np.full(100_000, hvd.rank() + 1.0), op=hvd.Sum)
assert (total == hvd.size() * (hvd.size() + 1) / 2).all()
if hvd.rank() == 0:
    print(places)
"""


def start_all(
    hosts: list[Host], ranks_each: int, address: str, key: Path, script: str
) -> list[tuple[int, str, str]]:
    started = [
        host.start(*python(script), **variables)
        for host, variables in places(hosts, ranks_each, address, key)
    ]
    return finish(started)


def expect_places(network: Network, hosts: int, ranks_each: int, address: str, key: Path) -> None:
    ended = start_all(network.hosts[:hosts], ranks_each, address, key, WHERE)
    for code, _, errors in ended:
        assert code == 0, errors
    expected = [(local, ranks_each, host, hosts) for host in range(hosts) for local in range(ranks_each)]
    assert ended[0][1].strip() == str(expected)


@pytest.mark.parametrize("hosts", [2, 4])
def test_one_rank_a_host(network: Network, key_file: Path, hosts: int) -> None:
    expect_places(network, hosts, 1, f"{network.hosts[0].address}:29400", key_file)


def test_a_host_may_call_itself_by_a_loopback_address(network: Network, key_file: Path) -> None:
    expect_places(network, 2, 1, "hosta:29401", key_file)


def test_without_a_key_nobody_is_let_in_from_another_host(network: Network, tmp_path: Path) -> None:
    started = [
        host.start(*python(WHERE), **{name: text for name, text in variables.items() if "KEY" not in name})
        for host, variables in places(network.hosts[:1], 2, f"{network.hosts[0].address}:29402", tmp_path)
    ]
    code, _, errors = finish(started[:1])[0]
    started[1].kill()
    assert code == 1
    assert "the ranks need a common key" in errors
    assert "SIRTAKI_KEY_FILE=key for every rank" in errors
