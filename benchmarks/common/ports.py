"""Ports for peers that cannot choose their own."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Returns ports that are free at the moment."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
