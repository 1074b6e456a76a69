"""hvdrun --torch-env: torch's variables on one host and on several, and the port that rank 0 listens at."""

from __future__ import annotations

import errno
import socket
import subprocess

import pytest
from launching import Hosts, Run

from sirtaki.bindings.bootstrap.connection import address
from sirtaki.runner.cli.options import parse
from sirtaki.runner.launch import torch_variables
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.torch_variables import MasterOffer, ReservedPort, offer_of_agent, offer_of_own_host

NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
SHOW = f"import os; print(*[os.environ.get(name, '-') for name in {[*NAMES, 'MASTER_ADDR', 'MASTER_PORT']}])"


def shown(result: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Returns the variables that the ranks have printed, in the order of ranks."""
    assert result.returncode == 0, result.stderr
    return [line.split()[1:] for line in sorted(result.stdout.splitlines())]


def test_nothing_is_set_without_the_option(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={})
    assert shown(hvdrun("-H", "localhost:1,hostB:1", "python", "-c", SHOW)) == [["-"] * 8] * 2


def test_one_host(hvdrun: Run) -> None:
    first, second = shown(hvdrun("-np", "2", "--torch-env", "python", "-c", SHOW))
    assert first[:-1] == ["0", "2", "0", "2", "0", "1", "127.0.0.1"]
    assert second == ["1", "2", "1", *first[3:]]
    assert 0 < int(first[-1]) < 65536


def test_torchruns_own_variables_are_not_passed_on(hvdrun: Run, environment: dict[str, str]) -> None:
    """With this one, no rank would serve the store."""
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    show = "import os; print(os.environ.get('TORCHELASTIC_USE_AGENT_STORE'))"
    assert shown(hvdrun("-np", "1", "--torch-env", "python", "-c", show)) == [["None"]]
    assert shown(hvdrun("-np", "1", "python", "-c", show)) == [["True"]]


@pytest.mark.parametrize("first", ["localhost", "hostB"])
def test_several_hosts(hvdrun: Run, hosts: Hosts, first: str) -> None:
    """The ranks of a host have its number in GROUP_RANK, also where hosts have different numbers of ranks."""
    hosts(hostB={}, hostC={})
    last = "hostB" if first == "localhost" else "localhost"
    found = shown(hvdrun("-H", f"{first}:1,hostC:3,{last}:2", "--torch-env", "python", "-c", SHOW))
    placements = ["0 6 0 1 0 3", "1 6 0 3 1 3", "2 6 1 3 1 3", "3 6 2 3 1 3", "4 6 0 2 2 3", "5 6 1 2 2 3"]
    assert [" ".join(one[:-2]) for one in found] == placements
    assert len({tuple(one[-2:]) for one in found}) == 1
    assert found[0][-2] in address.local_addresses()  # the stand-ins for hosts are this machine


def test_one_other_host(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={})
    found = shown(hvdrun("-H", "hostB:2", "--torch-env", "python", "-c", SHOW))
    assert [one[:-1] for one in found] == [
        [str(rank), "2", str(rank), "2", "0", "1", "127.0.0.1"] for rank in (0, 1)
    ]


def test_rank_0_can_listen_at_the_port_and_others_do_not_get_it(hvdrun: Run) -> None:
    """Rank 0 binds it with SO_REUSEADDR, as torch does; without, the port is taken."""
    script = (
        "import errno, os, socket; port = int(os.environ['MASTER_PORT'])\n"
        "taken = socket.socket()\n"
        "assert taken.connect_ex(('127.0.0.1', port)) == errno.ECONNREFUSED\n"
        "try: taken.bind(('', port)); raise SystemExit('it was free')\n"
        "except OSError as error: assert error.errno == errno.EADDRINUSE\n"
        "server = socket.create_server(('::', port), family=socket.AF_INET6, dualstack_ipv6=True) "
        "if socket.has_dualstack_ipv6() else socket.create_server(('', port))\n"
        "socket.create_connection(('127.0.0.1', port)).close(); print('served')"
    )
    result = hvdrun("-np", "1", "--torch-env", "python", "-c", script)
    assert (result.returncode, result.stdout) == (0, "[0] served\n"), result.stderr


def test_reserved_ports_differ() -> None:
    reserved = [ReservedPort() for _ in range(50)]
    assert len({port.number for port in reserved}) == 50
    with socket.socket() as other, pytest.raises(OSError, match="in use") as error:
        other.bind(("127.0.0.1", reserved[0].number))
    assert error.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("option", [["--min-np", "1"], ["--max-np", "3"], ["--host-discovery-script", "x"]])
def test_elastic_jobs_are_refused(option: list[str]) -> None:
    for torch_option in ("--torch-env", "--as-gloo"):
        with pytest.raises(LaunchError, match=f"{torch_option} is for jobs whose ranks stay"):
            parse([torch_option, "-np", "2", *option, "true"])


def test_a_dry_run_tells_it(hvdrun: Run) -> None:
    assert "torch's variables are set" in hvdrun("-np", "2", "--torch-env", "--dry-run", "true").stdout


def test_the_address_is_the_one_that_ssh_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    by_interface = {"eth0": ["10.0.0.2", "2001:db8::2"], "docker0": ["172.17.0.1"]}

    def addresses(names: tuple[str, ...]) -> list[str]:
        return [one for name in names or ("docker0", "eth0") for one in by_interface[name]]

    monkeypatch.setattr(address, "local_addresses", addresses)
    port = ReservedPort()

    def agents(connection: str, *names: str) -> MasterOffer:
        return offer_of_agent(port, names, {"SSH_CONNECTION": connection} if connection else {})

    assert agents("10.0.0.1 5000 10.0.0.2 22") == MasterOffer("10.0.0.2", port.number, "10.0.0.1")
    assert agents("10.0.0.1 5000 10.0.0.2 22", "docker0").address == "172.17.0.1"
    assert agents("127.0.0.1 5000 127.0.0.1 22", "eth0").address == "10.0.0.2"
    assert agents("UNKNOWN 65535 UNKNOWN 65535") == agents("") == MasterOffer("172.17.0.1", port.number)
    seen = [MasterOffer("10.0.0.3", 1, "2001:db8::2"), MasterOffer("10.0.0.4", 2, "172.17.0.1")]
    assert offer_of_own_host(port, seen, ()).address == "2001:db8::2"
    assert offer_of_own_host(port, seen, ("docker0",)).address == "172.17.0.1"
    monkeypatch.setattr(address, "local_addresses", lambda names: [])
    assert agents("").address == ""
    assert torch_variables.variables_of_hosts(["me@a", "b"], agents(""))["b"]["MASTER_ADDR"] == "a"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"address": "nowhere", "port": 1, "client": ""},
        {"address": "", "port": 0, "client": ""},
        {"address": "", "port": "x", "client": ""},
        {"address": "", "port": 1, "client": "10.0.0.1\nx"},
    ],
)
def test_malformed_offers_of_agents_are_rejected(answer: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the text of int() is Python's
        MasterOffer.parse(answer)
