"""Finds the hosts that cannot be reached from here, for a rank that could not link to the others."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Mapping, Sequence

from sirtaki.runner.rendezvous.address import resolve_all, split_address
from sirtaki.runner.rendezvous.interfaces import is_own_address

_SECONDS = 2.0  # TCP repeats its first packet after one second
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)  # the host has answered, whether or not a rank listens
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # nothing was sent


def find_unreachable(addresses: Mapping[int, Sequence[str]]) -> list[int]:
    """Returns the ranks of which no address answers: neither accepts nor refuses a connection.

    Args:
        addresses: by rank; all of them are tried at the same time. Those that this host has, too, prove
            nothing: a container's bridge has the same address on many hosts. A rank that cannot be tried,
            because this process may open no more files, is not among the returned ones.
    """
    try:
        return _find_unreachable(addresses)
    except OSError:  # not even one can be tried
        return []


def _find_unreachable(addresses: Mapping[int, Sequence[str]]) -> list[int]:
    with contextlib.ExitStack() as cleanup:
        selector = cleanup.enter_context(selectors.DefaultSelector())
        unreached = set(addresses)
        for rank, own in addresses.items():
            for address in own:
                if _begin(address, rank, selector, cleanup):
                    unreached.discard(rank)
        deadline = time.monotonic() + _SECONDS
        while unreached and selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                connection, rank = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                selector.unregister(connection)
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    unreached.discard(rank)
    return sorted(unreached)


def _begin(address: str, rank: int, selector: selectors.BaseSelector, cleanup: contextlib.ExitStack) -> bool:
    """Begins to connect; returns whether the host has answered already, or cannot be tried."""
    try:
        for family, sockaddr in resolve_all(*split_address(address)):
            if is_own_address(family, (sockaddr[0], 0, *sockaddr[2:])):
                continue
            connection = cleanup.enter_context(socket.socket(family))
            connection.setblocking(False)
            code = connection.connect_ex(sockaddr)
            if code in _ANSWERS or code in _EXHAUSTED:
                return True
            if code == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, rank)
    except OSError as error:  # or an address of a kind that this host does not have
        return error.errno in _EXHAUSTED
    return False
