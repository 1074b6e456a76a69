"""TLS on connections between hosts. The core provides it, and takes over established connections as links.

Each process has a certificate of its own, created when first needed. The job's key authenticates it: its
fingerprint is part of the hello (`handshake`), and no other certificate is accepted.
"""

from __future__ import annotations

import functools
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from sirtaki.bindings.bootstrap.job import HandshakeError, RendezvousError
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import ffi, lib, text

_FINGERPRINT_BYTES = 32
_library: str | None = None  # the file name of libssl; None: the core's default search


class Certificate:
    """A certificate with its key, and the OpenSSL that uses it. Raises RendezvousError without OpenSSL."""

    def __init__(self) -> None:
        error = ffi.new("srt_error *")
        pointer = lib.srt_tls_create(ffi.NULL if _library is None else _library.encode(), error)
        if pointer == ffi.NULL:
            raise RendezvousError(f"connections cannot be encrypted: {text(error.text)}")
        self.pointer: Any = ffi.gc(pointer, lib.srt_tls_destroy)
        fingerprint = ffi.new("uint8_t[]", _FINGERPRINT_BYTES)
        lib.srt_tls_fingerprint(pointer, fingerprint)
        self.fingerprint = bytes(fingerprint)


_make_once = functools.cache(Certificate)
_making = threading.Lock()  # two threads would create two certificates, of which only one is kept


def own_certificate() -> Certificate:
    """Returns this process's certificate. Raises RendezvousError, with what to install, without OpenSSL."""
    with _making:
        return _make_once()


class TlsConnection:
    """A connected socket with TLS, with the methods of a socket that its users need.

    One thread may receive while another one sends. `peer`: the fingerprint of the peer's certificate.
    """

    def __init__(self, connection: socket.socket, own: Certificate, peer: bytes, accepts: bool) -> None:
        error = ffi.new("srt_error *")
        session = lib.srt_tls_open(own.pointer, connection.fileno(), accepts, peer, error)
        if session == ffi.NULL:
            raise RendezvousError(text(error.text))
        self.socket = connection
        self.is_established = False
        self._session: Any = ffi.gc(session, lib.srt_tls_close)
        self._using = threading.Lock()  # the core's sessions are for one thread at a time

    def run_handshake(self) -> None:
        """Continues TLS's handshake, without blocking.

        Raises HandshakeError if it fails, ConnectionError if the peer has closed the connection.
        """
        error = ffi.new("srt_error *")
        status = lib.srt_tls_handshake(self._session, error)
        self.is_established = status == lib.SRT_OK
        if status == lib.SRT_PEER_LOST:
            raise ConnectionAbortedError(text(error.text))
        if status not in (lib.SRT_OK, lib.SRT_IN_PROGRESS):
            raise HandshakeError(text(error.text))

    @property
    def wants_write(self) -> bool:
        with self._using:
            return bool(lib.srt_tls_wants_write(self._session))

    @property
    def unread(self) -> int:
        """Returns the number of bytes that were taken from the socket and not read yet."""
        with self._using:
            return int(lib.srt_tls_unread(self._session))

    def recv(self, count: int) -> bytes:
        buffer = ffi.new("char[]", count)
        moved = self._move(select.POLLIN, lambda: lib.srt_tls_read(self._session, buffer, count))
        return bytes(ffi.buffer(buffer, max(moved, 0)))

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Sends like a socket; after a partial write, the next call has to begin with the rest of `data`."""
        with ffi.from_buffer(data) as view:
            moved = self._move(select.POLLOUT, lambda: lib.srt_tls_write(self._session, view, len(data)))
        if moved < 0:
            raise BrokenPipeError("the other side has closed the connection")
        return moved

    def settimeout(self, seconds: float | None) -> None:
        self.socket.settimeout(seconds)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Closes this end without a TLS goodbye: in a forked child the connection is the parent's."""
        self.socket.close()

    def give_to(self, context: Context, rank: int) -> None:
        """Makes the connection a link of the core, which takes ownership."""
        context.link_tls(rank, self.socket.fileno(), self._session)
        self._session = ffi.gc(self._session, None)
        self.socket.detach()

    def _move(self, event: int, step: Callable[[], int]) -> int:
        """Repeats a step that returns 0 while nothing moves, until the socket's timeout expires."""
        seconds = self.socket.gettimeout()
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            with self._using:
                moved = int(step())
            if moved != 0:
                return moved
            if seconds == 0:
                raise BlockingIOError
            left = None if deadline is None else deadline - time.monotonic()
            poll = select.poll()
            poll.register(self.socket, event)
            if (left is not None and left <= 0) or not poll.poll(None if left is None else left * 1000):
                raise TimeoutError("timed out")


Connection = socket.socket | TlsConnection
