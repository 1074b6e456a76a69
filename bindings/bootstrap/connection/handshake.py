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

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Generator
from dataclasses import replace

from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.bindings.bootstrap.job import HandshakeError, Identity, Job, LinkKind, Role

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
