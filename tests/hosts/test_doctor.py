"""`sirtaki doctor` on hosts with a network and real ssh between them, and faults in that network."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from .network import Host, Network


def examine(host: Host, hosts: str, code: int, *options: str) -> dict[str, Any]:
    """Runs the doctor on a host; returns its report."""
    command = [sys.executable, "-m", "sirtaki", "doctor", "--json", "--frameworks", "numpy"]
    ended, output, errors = host.run(*command, "-H", hosts, *options)
    assert (ended, errors) == (code, ""), output
    report: dict[str, Any] = json.loads(output)
    return report


def findings(report: dict[str, Any], level: str) -> dict[str, str]:
    """Returns the evidence by rule, of one level."""
    return {one["rule"]: one["evidence"] for one in report["findings"] if one["level"] == level}


def configure(host: Host, *words: str) -> None:
    """Changes the network of a host with `ip`."""
    subprocess.run(["ip", "-n", host.namespace, *words], check=True)


def test_hosts_that_reach_each_other(network: Network) -> None:
    first = network.hosts[0]
    report = examine(first, "hosta:1,hostb:2,hostc:1", 0)
    assert (report["job"]["ranks"], report["job"]["failure"]) == (3, "")
    assert findings(report, "problem") == {}
    assert findings(report, "warning").keys() <= {"link-slow"}  # this machine may be busy
    assert "hosta is 127.0.1.1" in findings(report, "note")["name-is-loopback"]
    pairs = {(link["source"], link["target"]) for link in report["links"]}
    names = ["localhost", "hostb", "hostc"]
    assert pairs == {(one, other) for one in names for other in names if one != other}
    for link in report["links"]:
        (attempt,) = [one for one in link["attempts"] if one["state"] == "open"]
        assert (attempt["mtu"], attempt["seen_as"]) == (1500, attempt["source"])
        assert link["speed"]["round_trip"] > 0
        assert link["speed"]["several_streams"] > 0


def test_another_mtu(fragile: Network) -> None:
    first, second = fragile.hosts
    configure(second, "link", "set", "dev", second.interface, "mtu", "1400")
    report = examine(first, "hosta:1,hostb:1", 0, "--quick")
    assert findings(report, "warning")["mtu-differs"] == "1500 on localhost; 1400 on hostb"


def test_interfaces_that_are_chosen(network: Network) -> None:
    first = network.hosts[0]
    report = examine(first, "hosta:1,hostb:1", 1, "--quick", "--network-interfaces", first.interface)
    assert report["hosts"]["localhost"]["network"]["reachable_at"] == [first.address]
    assert "there is no network interface 'eth0' on hostb" in findings(report, "problem")["no-address"]
    assert {link["source"]: bool(link["failure"]) for link in report["links"]} == {
        "localhost": True,
        "hostb": False,
    }


def test_a_limited_link(fragile: Network) -> None:
    first, second = fragile.hosts
    second.limit("100mbit")
    report = examine(first, "hosta:1,hostb:1", 0, "--quick")
    (slow,) = [one for one in report["findings"] if one["rule"] == "link-slow" and "hostb" in one["hosts"]]
    assert slow["what"] == "the connection to localhost is much slower than its card"
    assert slow["evidence"].endswith(" of 10000 Mbit/s")


def test_ports_behind_a_firewall(fragile: Network) -> None:
    first, second = fragile.hosts
    # Nothing leaves from the ports at which ranks listen; ssh's is not among them. (65535 is no valid end.)
    configure(second, "rule", "add", "ipproto", "tcp", "sport", "1024-65534", "blackhole")
    report = examine(first, "hosta:1,hostb:1", 1, "--quick")
    (blocked, other) = [one for one in report["findings"] if one["rule"] == "port-blocked"]
    assert blocked["hosts"] == ["localhost"]
    assert blocked["what"] == "connections to ports of hostb get no answer"
    assert blocked["evidence"] == f"{second.address} silent"
    assert other["hosts"] == ["hostb"]


def test_a_host_without_the_key_of_ssh(fragile: Network) -> None:
    first, second = fragile.hosts
    fragile.key.with_suffix(".pub").write_text("")
    report = examine(first, "hosta:1,hostb:1", 1, "--quick")
    assert findings(report, "problem").keys() == {"login-refused"}
    assert set(report["failures"]) == {second.name}
    assert report["failures"][second.name]["remedy"].startswith("`ssh-copy-id hostb` puts your key there")


def test_a_host_that_is_off(fragile: Network) -> None:
    first, second = fragile.hosts
    configure(first, "route", "add", "prohibit", second.address)
    report = examine(first, "hosta:1,hostb:1", 1, "--quick")
    assert "hostb" in report["failures"]
    assert set(report["hosts"]) == {"localhost"}
