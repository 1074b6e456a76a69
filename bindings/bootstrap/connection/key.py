"""The job's key: 32 random bytes, as hex in a file that only its owner may read. It is never shown."""

from __future__ import annotations

import os

from sirtaki.bindings.bootstrap.job import RendezvousError

KEY_BYTES = 32
KEY_ADVICE = (
    "write one with `python -c 'import secrets; print(secrets.token_hex(32))' > key && chmod 600 key` and "
    "set SIRTAKI_KEY_FILE=key for every rank"
)


def write_key(path: str, key: bytes | None = None) -> bytes:
    """Writes a key, by default a new key, to a new file at `path` (mode 0600), and returns the key."""
    key = key or os.urandom(KEY_BYTES)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.hex() + "\n")
    return key


def parse_key(text: str) -> bytes:
    """Converts hexadecimal digits to bytes; b"" if these are none."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def read_key(path: str) -> bytes:
    """Reads the key in the file at `path`. Raises RendezvousError if it is missing or not well protected."""
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(4 * KEY_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise RendezvousError(f"cannot read the job's key from {path} (SIRTAKI_KEY_FILE): {error}") from None
    if status.st_uid not in (os.getuid(), 0):
        raise RendezvousError(
            f"the job's key in {path} belongs to user {status.st_uid}, not to you: "
            "copy it to a file of your own"
        )
    if status.st_mode & 0o077:
        raise RendezvousError(f"others may read or write the job's key in {path}: run `chmod 600 {path}`")
    key = parse_key(text)
    if len(key) != KEY_BYTES:
        raise RendezvousError(
            f"{path} holds no key: it must be {KEY_BYTES} bytes, written as {2 * KEY_BYTES} hex digits"
        )
    return key
