"""The start of a process that serves HTTP on a host of a job: its address, its socket, its program.

hvdrun and agents start ranks while a job runs, and must not have threads: each server is a process of its
own, which delays nothing that they do. Its socket is bound before any rank starts, so that a port in use is
an error of the start.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from sirtaki.runner.cli.command import module_words
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.process import Process
from sirtaki.runner.launch.reaper import Reaper

LOOPBACK = "127.0.0.1"
_WAITING_CLIENTS = 8


def parse_address(text: str) -> tuple[str, int]:
    """Returns the host, by default the loopback address, and the port of "PORT" or "HOST:PORT".

    Raises ValueError.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"it takes a port from 0 to 65535, or HOST:PORT, not '{text}'")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def listen(address: str, option: str) -> socket.socket:
    """Returns a socket that listens at the address of an option. Raises LaunchError, with the option."""
    host, port = parse_address(address)
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=_WAITING_CLIENTS)
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)  # whose numbers are not those of the system's errors
        reason = error.strerror if is_name or error.errno is None else os.strerror(error.errno)
        raise LaunchError(
            f"{option}: cannot listen at port {port} of {host} on {socket.gethostname()}: {reason}. "
            "Choose another port, or 0 for one that is free",
            1,
        ) from None


def is_loopback(host: str) -> bool:
    """Returns whether only programs of this host reach a numeric address."""
    return host == "::1" or host.startswith("127.")


def authority(host: str, port: int) -> str:
    """Returns "HOST:PORT" as a URL has it."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def start_server(module: str, arguments: Sequence[str], listener: socket.socket, reaper: Reaper) -> Process:
    """Starts a module as a process that has the listening socket as its standard input.

    Raises LaunchError.
    """
    command = [sys.executable, *module_words(module), *arguments]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        return Process(command, os.environ, reaper, (listener.fileno(), null, 2))
    except OSError as error:
        raise LaunchError(f"cannot start {module}: {error.strerror}", 1) from None
    finally:
        os.close(null)
