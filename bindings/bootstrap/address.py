"""Where the rendezvous is: "unix:@name" (an abstract Unix socket) or "host:port"."""

from __future__ import annotations

import ipaddress
import socket
import time

from .handshake import BootstrapError, BootstrapTimeout

_UNIX = "unix:@"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between attempts to reach who is not listening yet


def listen_at(address: str, key: bytes) -> socket.socket:
    """A listening socket at `address`; port 0 lets the operating system choose.

    Raises BootstrapError if the address cannot be used, or if it is not loopback and there is no key.
    """
    if address.startswith(_UNIX):
        return _listen(address, socket.AF_UNIX, "\0" + address[len(_UNIX) :])
    host, port = split_address(address)
    family, place = _resolve(host, port)
    if not key and not ipaddress.ip_address(place[0].split("%")[0]).is_loopback:
        raise BootstrapError(
            f"{address} can be reached from other machines, so the ranks need a common key: write one with "
            "`python -c 'import secrets; print(secrets.token_hex(32))' > key && chmod 600 key` and set "
            "SIRTAKI_KEY_FILE=key for every rank"
        )
    return _listen(address, family, place)


def connect_to(address: str, deadline: float) -> socket.socket:
    """A socket connected to `address`. A "host:port" where nobody listens yet is tried again until the
    deadline.
    """
    if address.startswith(_UNIX):
        return _connect_unix(address)
    host, port = split_address(address)
    pause = _FIRST_PAUSE
    while True:
        try:
            connection = socket.create_connection(
                (host, port), timeout=max(deadline - time.monotonic(), 0.001)
            )
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except socket.gaierror as error:
            raise _unknown_host(host, error) from None
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                raise BootstrapTimeout(f"nobody answers at {address}: {error.strerror or error}") from None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[IPv6 address]:port"; raises ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"an address is written host:port, for example 127.0.0.1:29500, not {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def address_of(listening: socket.socket) -> str:
    """The address that reaches a socket of `listen_at`."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return _UNIX + bytes(name).decode().removeprefix("\0")
    return f"[{name[0]}]:{name[1]}" if listening.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"


def _connect_unix(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect("\0" + address[len(_UNIX) :])
    except OSError as error:
        connection.close()
        raise BootstrapError(
            f"the launcher (hvdrun) of this job is gone: nobody listens at {address} ({error.strerror})"
        ) from None
    return connection


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise _unknown_host(host, error) from None
    return family, (str(place[0]), int(place[1]))


def _listen(address: str, family: int, place: str | tuple[str, int]) -> socket.socket:
    listening = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(512)
    except OSError as error:
        listening.close()
        raise BootstrapError(f"cannot listen at {address}: {error.strerror}") from None
    return listening


def _unknown_host(host: str, error: socket.gaierror) -> BootstrapError:
    return BootstrapError(f"there is no host {host!r}: {error.strerror}")
