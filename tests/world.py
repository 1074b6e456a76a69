"""Worlds whose ranks are threads of this process, each with a context of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from sirtaki.bindings.bootstrap.connection.encryption import Certificate, TlsConnection
from sirtaki.bindings.context import Context, using
from sirtaki.bindings.library import Config, ffi, lib
from sirtaki.bindings.topology import Peer, SharedMemory, Topology

TRANSPORTS = ("shm", "socket")
ENCRYPTED = "encrypted"  # each rank on a host of its own, with TLS in between
PATIENCE = 120.0  # seconds: far longer than any correct run
SETTINGS = {"stall_report": "20", "stall_deadline": "40", "progress_deadline": "40"}


@dataclass
class World:
    """Ranks as threads."""

    contexts: list[Context]
    pool: ThreadPoolExecutor = field(repr=False)

    def run(self, body: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Calls `body(*arguments, **options)` as every rank, and returns the results by rank.

        Raises the first rank's error, with the errors of all as notes.
        """

        def as_rank(context: Context) -> Any:
            with using(context):
                return body(*arguments, **options)

        futures = [self.pool.submit(as_rank, context) for context in self.contexts]
        if wait(futures, PATIENCE).not_done:
            for context in self.contexts:
                context.abort(f"the test did not end within {PATIENCE} s")
        errors = [future.exception() for future in futures]
        failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if failed:
            texts = ["".join(traceback.format_exception(error)) for _, error in failed]
            raise AssertionError(
                "\n".join(f"rank {rank}:\n{text}" for (rank, _), text in zip(failed, texts, strict=True))
            )
        return [future.result() for future in futures]


@contextlib.contextmanager
def world(size: int, transport: str = "shm", **settings: str) -> Iterator[World]:
    """Makes a world of `size` ranks as threads; leaving it shuts all of them down."""
    is_encrypted = transport == ENCRYPTED
    own = {"encrypt": "1"} if is_encrypted else {"transport": transport}
    config = Config(SETTINGS | own | settings)
    contexts = [Context(topology, config) for topology in _topologies(size, is_encrypted)]
    with contextlib.ExitStack() as owned:
        if size > 1:
            (_link_memory if transport == "shm" else _link_sockets)(contexts, config, owned)
        pool = owned.enter_context(ThreadPoolExecutor(size))
        list(pool.map(Context.start, contexts))
        try:
            yield World(contexts, pool)
        finally:
            list(pool.map(Context.shutdown, contexts))


def in_world(size: int, **settings: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs the body of a test as every rank of a world; its parameter `transport`, if any, connects them."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(*arguments: Any, **named: Any) -> None:
            with world(size, named.get("transport", "shm"), **settings) as ranks:
                ranks.run(body, *arguments, **named)

        return run

    return decorate


def _topologies(size: int, on_many_hosts: bool) -> list[Topology]:
    peers = [Peer("testhost", os.getpid(), rank if on_many_hosts else 0) for rank in range(size)]
    if on_many_hosts:
        return [Topology(rank, size, 0, 1, rank, size, peers) for rank in range(size)]
    return [Topology(rank, size, rank, size, 0, 1, peers) for rank in range(size)]


def _link_memory(contexts: list[Context], config: Config, owned: contextlib.ExitStack) -> None:
    size = len(contexts)
    memory = lib.srt_memory_create(config.pointer, size, ffi.new("srt_error *"))
    owned.callback(os.close, memory)
    bells = [[lib.srt_doorbell_create(ffi.new("srt_error *")) for _ in contexts] for _ in range(2)]
    for bell in bells[0] + bells[1]:
        owned.callback(os.close, bell)
    for slot, context in enumerate(contexts):
        context.link_memory(
            SharedMemory(
                descriptor=memory,
                address=0,
                slot=slot,
                ranks=range(size),
                engine_doorbells=bells[0],
                waiter_doorbells=bells[1],
                process_descriptors=[-1] * size,
                socket_descriptors=[-1] * size,
            )
        )


def _link_sockets(contexts: list[Context], config: Config, owned: contextlib.ExitStack) -> None:
    for low, first in enumerate(contexts):
        for high in range(low + 1, len(contexts)):
            one, other = socket.socketpair()
            if config.get("encrypt") == "1":
                near, far = encrypt(one, other)
                near.give_to(first, high)
                far.give_to(contexts[high], low)
                continue
            first.link_socket(high, one.detach())
            contexts[high].link_socket(low, other.detach())


def encrypt(connecting: socket.socket, accepting: socket.socket) -> tuple[TlsConnection, TlsConnection]:
    """Returns both ends of a connection, with TLS on them."""
    first, second = Certificate(), Certificate()
    near = TlsConnection(connecting, first, second.fingerprint, accepts=False)
    far = TlsConnection(accepting, second, first.fingerprint, accepts=True)
    while not (near.is_established and far.is_established):
        near.run_handshake()
        far.run_handshake()
    return near, far
