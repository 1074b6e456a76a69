"""The handshake in which two processes of a job authenticate each other before they exchange anything else.

Each side sends a hello of fixed size; then the side that connected proves that it knows the job's key, then
the other side does. A proof is an HMAC-SHA256 over both hellos, and so over role, job, rank, kind of link,
generation, channel, protocol and library version, the fingerprint of the certificate where the connection
will be encrypted, and both nonces: it is valid for this connection and this direction only. Only the fixed
hello is parsed before the proof has been checked. Afterwards both sides exchange frames (`wire`), through TLS
where the connection is encrypted (`encryption`).

A rank that connects to another one may run the handshake on several connections, to several addresses. It
sends CHOSEN on the one that it uses; until then the other rank does not use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import selectors
import socket
import struct
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from sirtaki.bindings.bootstrap.connection.address import unmapped_address
from sirtaki.bindings.bootstrap.connection.wire import SendQueue, printable
from sirtaki.bindings.bootstrap.job import HandshakeError, Identity, Job, LinkKind, Role

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection, TlsConnection

PROTOCOL = 4
CHOSEN = b"\1"

HANDSHAKE_SECONDS = 10.0  # per connection, so that a slow peer does not use up a whole deadline

_MAGIC = b"sirtaki\0"
# magic, protocol, role, kind, rank, generation, channel, job, version, certificate, nonce
_HELLO = struct.Struct("!8sHBBiIH16s32s32s32s")
_PROOF_BYTES = hashlib.sha256().digest_size

HandshakeSteps = Generator[tuple[bytes, int], bytes, Identity]


def begin_handshake(
    connection: socket.socket, job: Job, mine: Identity, kind: LinkKind, role: Role
) -> HandshakeSteps:
    """Begins the handshake on a connection. Where it has to be encrypted, as any but a Unix socket may have
    to be, this side identifies itself with its certificate, too.

    Raises RendezvousError without OpenSSL.
    """
    if job.encrypt and connection.family != socket.AF_UNIX:
        # Opens the core, which hvdrun otherwise avoids.
        from sirtaki.bindings.bootstrap.connection.encryption import own_certificate

        mine = replace(mine, certificate=own_certificate().fingerprint)
    return handshake_steps(job, mine, kind, role)


def handshake_steps(job: Job, mine: Identity, kind: LinkKind, role: Role) -> HandshakeSteps:
    """Runs the handshake without input and output.

    Yields the bytes to send, and how many bytes to pass back in; returns the identity that the peer has
    proved. Raises HandshakeError if that is not the expected one.
    """
    hello = _HELLO.pack(
        _MAGIC,
        PROTOCOL,
        role,
        kind,
        mine.rank,
        mine.generation,
        mine.channel,
        _job_hash(job),
        job.version.encode(),
        mine.certificate,
        os.urandom(32),
    )
    theirs = yield hello, _HELLO.size
    peer, version = _checked_hello(theirs, job, mine, kind, role)
    hellos = hello + theirs if role is Role.CONNECTS else theirs + hello
    if role is Role.CONNECTS:
        proof = yield _proof(job.key, Role.CONNECTS, hellos), _PROOF_BYTES
        _check_proof(proof, _proof(job.key, Role.ACCEPTS, hellos), peer)
    else:
        proof = yield b"", _PROOF_BYTES
        _check_proof(proof, _proof(job.key, Role.CONNECTS, hellos), peer)
        yield _proof(job.key, Role.ACCEPTS, hellos), 0
    if version != job.version:
        raise HandshakeError(
            f"{peer.name} runs sirtaki {version}, but {mine.name} runs sirtaki {job.version}: "
            "install the same version for every rank"
        )
    check_encryption(bool(peer.certificate), peer.name, bool(mine.certificate), mine.name)
    return peer


def check_encryption(there: bool, peer: str, here: bool, mine: str) -> None:
    """Raises HandshakeError unless both sides encrypt connections between hosts, or neither does."""
    if there != here:
        raise HandshakeError(
            f"the setting encrypt is {int(there)} on {peer} and {int(here)} on {mine}: set SIRTAKI_ENCRYPT "
            "to one value for all ranks (with hvdrun: use --encrypt, or do not)"
        )


def _checked_hello(
    hello: bytes, job: Job, mine: Identity, kind: LinkKind, role: Role
) -> tuple[Identity, str]:
    magic, protocol, their_role, their_kind, rank, generation, channel, job_hash, version, certificate, _ = (
        _HELLO.unpack(hello)
    )
    if magic != _MAGIC:
        raise HandshakeError("the other side is not a process of sirtaki")
    if protocol != PROTOCOL:
        raise HandshakeError(
            f"the other side speaks version {protocol} of sirtaki's protocol, {mine.name} speaks {PROTOCOL}: "
            "install the same version for every rank"
        )
    if job_hash != _job_hash(job):
        raise HandshakeError(f"the other side belongs to another job than {mine.name}")
    if their_kind != kind or their_role == role:
        raise HandshakeError("the other side wants another kind of connection")
    peer = Identity(rank, generation, channel, certificate if any(certificate) else b"")
    return peer, printable(version.rstrip(b"\0").decode(errors="replace"))


def _job_hash(job: Job) -> bytes:
    return hashlib.sha256(job.id.encode()).digest()[:16]


def _proof(key: bytes, role: Role, hellos: bytes) -> bytes:
    return hmac.digest(key, bytes([role]) + hellos, "sha256")


def _check_proof(proof: bytes, expected: bytes, peer: Identity) -> None:
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError(f"a process that claims to be {peer.name} does not know the key of this job")


# ---- A connection that does not block, to a peer that has not yet authenticated ------------------------


OWN_MACHINE = "this machine"  # the source of connections over Unix sockets
_READ_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")


class HandshakeConnection:
    """One accepted connection with non-blocking input and output.

    Reads no byte beyond the handshake until it is complete: the bytes that follow may be for another reader.
    """

    def __init__(
        self,
        connection: socket.socket,
        steps: HandshakeSteps,
        deadline: float,
        role: Role = Role.ACCEPTS,
    ) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.source, self.origin = _origin(connection)  # counted under this network; for messages
        self.deadline = deadline  # time.monotonic(); deadline for the proof
        self.peer: Identity | None = None  # the authenticated identity
        self.has_answered = False  # whether its first message has arrived
        self.incoming = bytearray()
        self.outgoing = SendQueue()
        self._steps = steps
        self._role = role
        self._tls: TlsConnection | None = None  # set once both sides have authenticated
        hello, self._wanted = next(steps)
        self.outgoing += hello

    @property
    def connection(self) -> Connection:
        """Returns the connection for its next user, once `is_established`."""
        return self._tls or self.socket

    @property
    def is_established(self) -> bool:
        """Returns whether the handshake is complete, including TLS's if the connection is encrypted."""
        if self.peer is None:
            return False
        return not self.peer.certificate or (self._tls is not None and self._tls.is_established)

    @property
    def interest(self) -> int:
        """Returns the events to wait for, as a selector's mask."""
        is_writing = self.outgoing or (self._tls and self._tls.wants_write)
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if is_writing else 0)

    @property
    def has_unread(self) -> bool:
        """Returns whether data has arrived that a selector would not report."""
        return self.is_established and self._tls is not None and self._tls.unread > 0

    @property
    def is_complete(self) -> bool:
        """Returns whether the connection is ready for its next user: established, and all sent."""
        return self.is_established and not self.outgoing

    def advance(self) -> bool:
        """Continues the handshake; returns False once the connection is closed. Raises HandshakeError."""
        try:
            is_open = self.receive()
            self.authenticate()
            self.send()
        except OSError:
            return False
        return is_open

    def receive(self) -> bool:
        """Reads available data; False at the end of the stream. Raises HandshakeError if TLS's fails."""
        if self.peer is not None and not self.is_established:
            self._encrypt()
            return True
        wanted = _READ_BYTES if self.peer else self._wanted - len(self.incoming)
        try:
            data = self.connection.recv(wanted)
        except BlockingIOError:
            return True
        self.incoming += data
        return bool(data)

    def send(self) -> None:
        """Writes as much as fits. Raises HandshakeError if TLS's fails."""
        self._flush()
        if self.peer is not None and not self.is_established:
            self._encrypt()

    def read_choice(self) -> bool | None:
        """Returns whether the rank that connects has chosen this connection, which is complete; None: it has
        yet to say so.
        """
        try:
            return self.connection.recv(len(CHOSEN)) == CHOSEN
        except BlockingIOError:
            return None
        except OSError:
            return False

    def hand_over(self) -> Connection:
        """Returns the established connection, set to blocking."""
        self.socket.setblocking(True)
        return self.connection

    def _flush(self) -> None:
        self.outgoing.send(self.connection)

    def flush_hello(self) -> None:
        """Writes as much as fits before this side closes: the hello tells the peer why it is rejected."""
        with contextlib.suppress(OSError):
            self._flush()

    def _encrypt(self) -> None:
        """Continues TLS's handshake, which begins when the first handshake has been sent completely."""
        if self.outgoing or self.peer is None:
            return
        if self._tls is None:
            from sirtaki.bindings.bootstrap.connection.encryption import (  # opens the core
                TlsConnection,
                own_certificate,
            )

            accepts = self._role is Role.ACCEPTS
            self._tls = TlsConnection(self.socket, own_certificate(), self.peer.certificate, accepts)
        try:
            self._tls.run_handshake()
        except HandshakeError as error:
            raise HandshakeError(f"the connection to {self.peer.name} cannot be encrypted: {error}") from None

    def authenticate(self) -> None:
        """Continues the handshake as far as the received bytes allow. Raises HandshakeError."""
        while self.peer is None and len(self.incoming) >= self._wanted:
            answer = bytes(self.incoming[: self._wanted])
            del self.incoming[: self._wanted]
            self.has_answered = True
            try:
                data, self._wanted = self._steps.send(answer)
                self.outgoing += data
            except StopIteration as finished:
                self.peer = finished.value


def close_selector(selector: selectors.BaseSelector) -> None:
    """Closes a selector, and everything that is registered with it."""
    for key in list((selector.get_map() or {}).values()):
        cast(socket.socket, key.fileobj).close()
    selector.close()


def is_trusted_user(connection: socket.socket) -> bool:
    """Returns whether the peer of a Unix socket runs as the same user, or as root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (os.getuid(), 0)


def _origin(connection: socket.socket) -> tuple[str, str]:
    try:
        name = connection.getpeername()
    except OSError:
        return "somewhere", "somewhere"
    if not isinstance(name, tuple):
        return OWN_MACHINE, OWN_MACHINE
    return _network(unmapped_address(name[0])), f"{unmapped_address(name[0])} port {name[1]}"


def _network(address: str) -> str:
    """Returns the part of an address that its owner cannot choose: a host may use an IPv6 /64 (RFC 4291)."""
    number = ipaddress.ip_address(address.split("%")[0])
    if number.version == 4:
        return address
    return str(ipaddress.ip_network((int(number) >> 64 << 64, 64)))
