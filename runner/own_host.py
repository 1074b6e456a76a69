"""Recognises this machine among the hosts that a user or a script names."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from sirtaki.runner.hosts import Host, is_this_host, merge_own
from sirtaki.runner.rendezvous.interfaces import is_own_address


def with_own_host(hosts: Sequence[Host]) -> list[Host]:
    """Returns the hosts with every name of this machine replaced by "localhost" and merged."""
    own_names = (socket.gethostname(), socket.getfqdn())
    return merge_own(hosts, lambda name: is_this_host(name, own_names, _is_own_name))


def _is_own_name(name: str) -> bool:
    """Returns whether a name means an address of this machine."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # perhaps a name that only ssh knows
        return False
    return any(is_own_address(family, sockaddr) for family, _, _, _, sockaddr in found)
