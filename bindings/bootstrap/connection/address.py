"""This machine's identity and addresses, and the addresses of listeners as text.

These are "unix:/path", "unix:@name" (an abstract Unix socket), "host:port" or "[IPv6 address]:port". Several
addresses of the same listener are separated by commas; a client tries all of them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from sirtaki.bindings.bootstrap.job import KEY_ADVICE, Job, RendezvousError

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


def host_identity() -> str:
    """Identifies this host: the boot of the machine, and the network namespace of abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


# ---- Addresses as text, and sockets that listen --------------------------------------------------------

_UNIX = "unix:"
_PATH_LIMIT = 100  # bytes; the system allows 107 (unix(7)), and ranks reject longer names from each other
_BACKLOG = 512


def split_addresses(addresses: str) -> list[str]:
    """Splits "a:1,b:2" and checks each; raises ValueError for an invalid address, or for none."""
    found = [address.strip() for address in addresses.split(",") if address.strip()]
    for address in found or [addresses]:
        if not is_unix(address):
            split_address(address)
    return found


def is_unix(address: str) -> bool:
    return address.startswith(_UNIX)


def is_abstract(address: str) -> bool:
    """Returns whether an address is a Unix socket without a file."""
    return address.startswith(f"{_UNIX}@")


def unix_address(name: str, folder: str = "") -> str:
    """Returns a Unix socket address: a file in `folder`, which only its user may open, so no other user can
    reach it.

    Without a folder, or if the path is too long for an address, it is an abstract socket, to which any local
    process can connect.
    """
    path = os.path.join(folder, name)
    fits = path.isascii() and path.isprintable() and "," not in path and len(path) <= _PATH_LIMIT - len(_UNIX)
    return f"{_UNIX}{path}" if folder and fits else f"{_UNIX}@{name}"


def unix_addresses(name: str, folder: str) -> str:
    """Returns the addresses of a Unix socket in a folder, and of an abstract socket of this name.

    The abstract socket serves another init() after the system has cleaned the folder away.
    """
    return ",".join(dict.fromkeys([unix_address(name, folder), unix_address(name)]))


def network_address() -> str:
    """Returns the address of a server that listens on all of this machine's interfaces."""
    return "[::]:0" if socket.has_dualstack_ipv6() else "0.0.0.0:0"


def addresses_for_others(addresses: str) -> str:
    """Returns the addresses of a server that processes on different hosts may be able to reach."""
    found = [address for address in addresses.split(",") if not address.startswith((_UNIX, "127.", "[::1]"))]
    return ",".join(found)


def unix_path(address: str) -> str:
    """Returns the name of a Unix socket in the form that the socket functions take."""
    name = address[len(_UNIX) :]
    return "\0" + name[1:] if name.startswith("@") else name


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[IPv6 address]:port"; raises ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"an address is written host:port, for example 127.0.0.1:29500, not {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether a numerical address reaches this machine only."""
    return ipaddress.ip_address(host.split("%")[0]).is_loopback


def require_key(connection: socket.socket, job: Job) -> None:
    """Rejects a TCP connection that the job's key cannot authenticate.

    Without a key a connection must not leave this machine. A key from a store may be known to whoever can
    reach the store, so the job uses Unix sockets only: the system says whose process is at their other end.

    Raises RendezvousError in these cases.
    """
    if connection.family == socket.AF_UNIX or (job.key and not job.through_store):
        return
    other = unmapped_address(str(connection.getpeername()[0]))
    if job.through_store:
        raise RendezvousError(
            f"the ranks of this job connect over Unix sockets only, not to {other}: its key passed through a "
            f"store that others may read and write. For TCP, {KEY_ADVICE}"
        )
    if not is_loopback(other):
        raise RendezvousError(f"{other} is another machine, so the ranks need a common key: {KEY_ADVICE}")


def listen_at(address: str, key: bytes) -> socket.socket:
    """Returns a listening socket at `address`; port 0 lets the operating system choose, "*" means all
    addresses.

    A host name may resolve differently on this machine than on others: to a loopback address (as "127.0.1.1"
    does on Debian), or to an address that this machine does not have. If there is a key, the socket then
    listens on all addresses.

    Raises RendezvousError if the address cannot be used, or if it is not loopback and there is no key.
    """
    if is_unix(address):
        return _listen(address, socket.AF_UNIX, unix_path(address))
    host, port = split_address(address)
    family, sockaddr = _resolve("0.0.0.0" if host == "*" else host, port)
    if not key and not is_loopback(sockaddr[0]):
        raise RendezvousError(
            f"{address} can be reached from other machines, so the ranks need a common key: {KEY_ADVICE}"
        )
    is_name = host not in (sockaddr[0], "localhost", "*")
    if host == "*" or (is_name and key and not _is_reachable(family, sockaddr[0])):
        return listen_everywhere(port)
    return _listen(address, family, sockaddr)


def listen_everywhere(port: int = 0) -> socket.socket:
    """Returns a listening socket on all addresses of this machine, IPv4 and IPv6 where both exist."""
    with contextlib.suppress(RendezvousError):
        return _listen(f"[::]:{port}", socket.AF_INET6, ("::", port))
    return _listen(f"0.0.0.0:{port}", socket.AF_INET, ("0.0.0.0", port))


def addresses_of(listening: socket.socket, interfaces: Sequence[str] = ()) -> list[str]:
    """Returns the addresses at which clients reach a listening socket.

    A socket that listens on all addresses has those of the named `interfaces`, or of all interfaces if none
    are named.
    """
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return [_UNIX + (name if isinstance(name, str) else "@" + bytes(name).decode().removeprefix("\0"))]
    host, port = name[0], name[1]
    if not ipaddress.ip_address(host).is_unspecified:
        return [join_address(host, port)]
    found = local_addresses(interfaces)
    if listening.family == socket.AF_INET:
        found = [address for address in found if ":" not in address]
    return [join_address(address, port) for address in found] or [join_address("127.0.0.1", port)]


def resolve_all(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    """Resolves a host name to a list of (family, place). Raises socket.gaierror."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, (str(sockaddr[0]), int(sockaddr[1]))) for family, _, _, _, sockaddr in found]


def unknown_host_error(host: str, error: socket.gaierror) -> RendezvousError:
    return RendezvousError(f"there is no host {host!r}: {error.strerror}")


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    try:
        return resolve_all(host, port)[0]
    except socket.gaierror as error:
        raise unknown_host_error(host, error) from None


def _is_reachable(family: int, host: str) -> bool:
    """Returns whether a numerical address belongs to this machine and is usable from other machines."""
    return not is_loopback(host) and is_own_address(family, (host, 0))


def _listen(address: str, family: int, sockaddr: str | tuple[str, int]) -> socket.socket:
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(sockaddr, family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise RendezvousError(f"cannot listen at {address}: {reason}") from None
