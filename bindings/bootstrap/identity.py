"""The properties of ranks and how they can be reached: each rank's data for the first two all-gathers, and
the check that these data are consistent.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sirtaki.bindings.bootstrap.connection.address import is_unix, split_address
from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.bindings.bootstrap.job import RendezvousError
from sirtaki.bindings.topology import Peer, Topology

_MAX_ADDRESSES = 64
# Raised when a value of the wrong type or size is read out of JSON, endless nesting included.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class RankDescription:
    """A rank's description of itself.

    Attributes:
        host: its host, in a form that equals no other host's (boot and network namespace).
        hostname: the host's usual name.
        pid: its process number on that host.
        listens_at: name of its abstract Unix socket.
        settings: a digest of its settings that must be equal on all ranks. Ranks exchange the settings
            themselves only if these differ, for they would be most of the bytes of a start.
    """

    host: str
    hostname: str
    pid: int
    listens_at: str
    settings: str


def pack(description: RankDescription | Offer) -> bytes:
    return json.dumps(asdict(description)).encode()


def unpack(payload: bytes) -> RankDescription:
    """Parses the description that an authenticated rank sent; raises RendezvousError if it is malformed."""
    try:
        values = json.loads(payload)
        settings, pid, listens_at = str(values["settings"]), int(values["pid"]), str(values["listens_at"])
        is_address = is_unix(listens_at) and listens_at.isascii() and listens_at.isprintable()
        if not 0 < pid < 1 << 31 or not (listens_at == "" or (is_address and len(listens_at) <= 100)):
            raise ValueError
        if not re.fullmatch("[0-9a-f]{64}", settings):
            raise ValueError
        hostname = _printable_line(values["hostname"], 100)
        return RankDescription(str(values["host"]), hostname, pid, listens_at, settings)
    except _MALFORMED:
        raise RendezvousError("a rank sent a malformed description of itself") from None


def pack_settings(settings: Mapping[str, str]) -> bytes:
    return json.dumps(settings, sort_keys=True).encode()


def unpack_settings(payload: bytes) -> Mapping[str, str]:
    """Parses the settings that an authenticated rank sent; raises RendezvousError if they are malformed."""
    try:
        return {
            _printable_line(name, 100): _printable_line(value, 200)
            for name, value in dict(json.loads(payload)).items()
        }
    except _MALFORMED:
        raise RendezvousError("a rank sent malformed settings") from None


def _printable_line(value: object, limit: int) -> str:
    return printable(str(value), limit).replace("\n", "?")


def host_identity() -> str:
    """Identifies this host: the boot of the machine, and the network namespace of abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def describe_process(listens_at: str, settings: Mapping[str, str], role: str = "") -> RankDescription:
    """Returns the description of this process. The role, if any, is shown after the host name in texts."""
    hostname = f"{socket.gethostname()}, {role}" if role else socket.gethostname()
    digest = hashlib.sha256(pack_settings(settings)).hexdigest()
    return RankDescription(host_identity(), hostname, os.getpid(), listens_at, digest)


@dataclass(frozen=True)
class Offer:
    """The ways to reach a rank, determined once it is known which ranks share a host.

    Attributes:
        addresses: addresses that ranks of other hosts can try to connect to; empty if there are none.
        no_memory: why its host has no shared memory; "" if it has, or if another rank of the host reports it.
    """

    addresses: Sequence[str]
    no_memory: str


def unpack_offer(payload: bytes) -> Offer:
    """Parses the offer that an authenticated rank sent; raises RendezvousError if it is malformed."""
    try:
        values = json.loads(payload)
        addresses = [str(address) for address in list(values["addresses"])]
        if len(addresses) > _MAX_ADDRESSES:
            raise ValueError
        for address in addresses:
            ipaddress.ip_address(split_address(address)[0])
        return Offer(addresses, _printable_line(values["no_memory"], 500))
    except _MALFORMED:
        raise RendezvousError("a rank sent malformed addresses of itself") from None


def agree(members: Sequence[RankDescription]) -> bool:
    """Returns whether all ranks have the same settings that must be equal."""
    return all(member.settings == members[0].settings for member in members)


def disagreement(settings: Sequence[Mapping[str, str]]) -> RendezvousError:
    """Returns the error that names the first setting in which ranks differ, with both values."""
    first = settings[0]
    for rank, setting in enumerate(settings):
        for name in sorted(first.keys() | setting.keys()):
            ours, theirs = first.get(name), setting.get(name)
            if ours != theirs:
                variable = f"SIRTAKI_{name.upper()}"
                return RendezvousError(
                    f"the setting {name} is {ours} on rank 0 and {theirs} on rank {rank}: "
                    f"set {variable} to one value for all ranks"
                )
    return RendezvousError("ranks have other settings than they have announced")


def ranks_of_host(rank: int, members: Sequence[RankDescription]) -> list[int]:
    """Returns the ranks that share a host with `rank`, ascending, itself included."""
    return [other for other, member in enumerate(members) if member.host == members[rank].host]


def topology_of(rank: int, members: Sequence[RankDescription]) -> Topology:
    """Computes a rank's topology from the hosts of all ranks."""
    hosts = list(dict.fromkeys(member.host for member in members))
    ranks_of = {host: [r for r, member in enumerate(members) if member.host == host] for host in hosts}
    here = members[rank].host
    local_rank = ranks_of[here].index(rank)
    cross_hosts = [host for host in hosts if len(ranks_of[host]) > local_rank]
    peers = [Peer(member.hostname, member.pid, hosts.index(member.host)) for member in members]
    return Topology(
        rank, len(members), local_rank, len(ranks_of[here]), cross_hosts.index(here), len(cross_hosts), peers
    )
