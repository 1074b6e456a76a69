"""The variables by which torch.distributed finds the ranks of a job: `hvdrun --torch-env`.

Rank 0 listens at MASTER_ADDR:MASTER_PORT, long after hvdrun had to choose the port. The port is therefore
reserved on the host of rank 0 until the job ends: a socket is bound to it that does not listen. The system
then gives the port to nobody who asks for any port, and rank 0 may still listen there, because both sockets
have SO_REUSEADDR, which torch sets.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SSH = "SSH_CONNECTION"  # set by sshd: the client's address and port, then the server's
_LOOPBACK = "127.0.0.1"


class ReservedPort:
    """A TCP port of this host, for rank 0 to listen at."""

    def __init__(self) -> None:
        is_dual = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_dual:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("::" if is_dual else "0.0.0.0", 0))
        self.number: int = self._socket.getsockname()[1]


@dataclass(frozen=True)
class MasterOffer:
    """The place on a host where rank 0 would listen, if it ran there.

    Attributes:
        address: at which ranks of other hosts reach this host; "" if it has none.
        port: reserved for rank 0.
        client: the address of hvdrun's host, as ssh on this host has seen it; "" if unknown.
    """

    address: str
    port: int
    client: str = ""

    @classmethod
    def parse(cls, values: Any) -> MasterOffer:
        """Returns the offer in an agent's answer. Raises ValueError if it is malformed."""
        try:
            address, port, client = str(values["address"]), int(values["port"]), str(values["client"])
        except (TypeError, KeyError, IndexError):
            raise ValueError("an agent's offer for torch is malformed") from None
        if not (all(_is_address(part) for part in (address, client) if part) and 0 < port < 1 << 16):
            raise ValueError("an agent's offer for torch has no valid address or port")
        return cls(address, port, client)


def offer_of_agent(
    port: ReservedPort, interfaces: Sequence[str], environment: Mapping[str, str] = os.environ
) -> MasterOffer:
    """Returns the offer of a host on which an agent runs, for its answer to hvdrun."""
    client, _, server, _ = [*environment.get(_SSH, "").split(), "", "", "", ""][:4]
    return MasterOffer(
        _address_for_others(server, interfaces), port.number, client if _is_address(client) else ""
    )


def offer_of_own_host(
    port: ReservedPort, others: Sequence[MasterOffer], interfaces: Sequence[str]
) -> MasterOffer:
    """Returns the offer of hvdrun's host; preferably with the address that agents know from ssh."""
    if not others:
        return MasterOffer(_LOOPBACK, port.number)
    return MasterOffer(_address_for_others(others[0].client, interfaces), port.number)


def variables_of_hosts(names: Sequence[str], first: MasterOffer) -> dict[str, dict[str, str]]:
    """Returns the variables that are equal for all ranks of a host, by the hosts' names.

    Args:
        names: the hosts in the order of their ranks.
        first: the offer of the first of them, which runs rank 0.
    """
    address = _LOOPBACK if len(names) == 1 else first.address or names[0].rpartition("@")[2]
    master = {"MASTER_ADDR": address, "MASTER_PORT": str(first.port)}
    return {
        name: {**master, "GROUP_RANK": str(index), "GROUP_WORLD_SIZE": str(len(names))}
        for index, name in enumerate(names)
    }


def _is_address(text: str) -> bool:
    import ipaddress  # not needed on a single host

    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _address_for_others(preferred: str, interfaces: Sequence[str]) -> str:
    """Returns the preferred address if this host has it on the interfaces, else any other, else ""."""
    from sirtaki.bindings.bootstrap.connection.address import local_addresses  # imports psutil
    from sirtaki.bindings.bootstrap.job import RendezvousError

    found: list[str] = []
    with contextlib.suppress(RendezvousError):  # init() reports an interface that does not exist
        found = local_addresses(interfaces)
    return preferred if preferred in found else next(iter(found), "")
