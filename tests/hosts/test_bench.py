"""`sirtaki bench` among hosts with a network between them: its limit is that of the slowest link."""

from __future__ import annotations

import json
import sys
from typing import Any

from .network import Host, Network

COMMAND = (sys.executable, "-m", "sirtaki", "bench")
RATE = 100e6 / 8  # bytes per second of a link of 100 Mbit/s


def bench(host: Host, *arguments: str) -> dict[str, Any]:
    """Runs the program on a host; returns its figures."""
    ended, output, errors = host.run(*COMMAND, *arguments, "--rounds", "1", "--json", "-")
    assert ended == 0, output + errors
    values: dict[str, Any] = json.loads(output)
    return values


def test_the_limit_is_the_network(fragile: Network) -> None:
    for host in fragile.hosts:
        host.limit("100mbit")
    values = bench(fragile.hosts[0], "-H", "hosta:1,hostb:1", "-b", "1M", "-e", "1M")
    assert (values["ranks"], values["wrong"]) == (2, 0)
    assert "plain TCP from each host to the next" in values["limit"]
    (row,) = values["rows"]
    assert row["limit_us"] > 0.3 * (1 << 20) / RATE * 1e6  # a burst may pass a limit for a moment
    assert row["limit"] > 0


def test_links_are_those_between_hosts(network: Network) -> None:
    values = bench(network.hosts[0], "link", "-H", "hosta:2,hostb:1,hostc:1", "-e", "64K")
    assert values["link_ranks"] == [0, 2, 3]  # the first of each host
    assert len(set(values["link_hosts"])) == 3
    assert values["wrong"] == 0
    for row, rates in enumerate(values["bytes_per_second"]):
        assert [rate > 0 for rate in rates] == [column != row for column in range(3)]
