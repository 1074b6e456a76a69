"""The addresses of this machine's network interfaces."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from sirtaki.bindings.bootstrap.job import RendezvousError

VARIABLE = "SIRTAKI_NETWORK_INTERFACES"  # names, separated by commas; none: all
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"  # prefixes of names; after "=": whole names


def chosen_interfaces(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the interfaces that the user has chosen; [] for all."""
    return [name.strip() for name in environment.get(VARIABLE, "").split(",") if name.strip()]


def restrict_nccl(environment: MutableMapping[str, str] = os.environ) -> None:
    """Restricts NCCL to the interfaces that the user has chosen, unless its own variable is set already."""
    if names := chosen_interfaces(environment):
        environment.setdefault(NCCL_VARIABLE, "=" + ",".join(names))


def local_addresses(interfaces: Sequence[str] = ()) -> list[str]:
    """Returns this machine's addresses for other machines, IPv4 first; no loopback, no scoped addresses.

    Raises RendezvousError if one of the `interfaces` does not exist.
    """
    import psutil  # not needed while all ranks are on one host

    by_interface = psutil.net_if_addrs()
    states = psutil.net_if_stats()
    for name in interfaces:
        if name not in by_interface:
            existing = ", ".join(sorted(by_interface))
            raise RendezvousError(
                f"there is no network interface {name!r} on {socket.gethostname()}: there are {existing}"
            )
    found = [
        address.address
        for name, addresses in by_interface.items()
        if (not interfaces or name in interfaces) and (name not in states or states[name].isup)
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and _is_routable(address.address)
    ]
    return sorted(found, key=lambda address: ":" in address)


def source_towards(connection: socket.socket) -> list[str]:
    """Returns this machine's address on a connection's route; [] if that is loopback, or no network."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return []
    address = unmapped_address(str(connection.getsockname()[0]))
    return [address] if _is_routable(address) else []


def unmapped_address(address: str) -> str:
    """Converts an IPv4 address in IPv6 notation to IPv4 notation."""
    mapped = getattr(ipaddress.ip_address(address.split("%")[0]), "ipv4_mapped", None)
    return str(mapped) if mapped else address


def is_own_address(family: int, sockaddr: Any) -> bool:
    """Returns whether this machine has an address: no other can be bound. The port in `sockaddr` is 0."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(sockaddr)
    except OSError:
        return False
    return True


def _is_routable(address: str) -> bool:
    number = ipaddress.ip_address(address.split("%")[0])
    return not (number.is_loopback or number.is_link_local or number.is_unspecified)
