"""Two processes of one job authenticate each other, and reject everyone else."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from handshakes import run_handshake
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.job import (
    HandshakeError,
    Identity,
    Job,
    LinkKind,
    RendezvousError,
    RendezvousTimeout,
    Role,
    read_key,
    write_key,
)

JOB = Job("job", 3, b"k" * 32, "1.0")


def shake(
    connecting: Job, accepting: Job, tamper: Callable[[bytes], bytes] = lambda data: data
) -> list[object]:
    """Runs a handshake over a line that changes the bytes; returns the results of both sides."""
    left, left_line = socket.socketpair()
    right_line, right = socket.socketpair()
    deadline = time.monotonic() + FAILSAFE_SECONDS

    def side(own: socket.socket, job: Job, rank: int, role: Role) -> object:
        with own:
            try:
                return run_handshake(own, job, Identity(rank, 5), LinkKind.PEERS, role, deadline)
            except RendezvousError as error:
                return error

    def carry(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(change(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    with ThreadPoolExecutor(4) as pool, left_line, right_line:
        pool.submit(carry, left_line, right_line, tamper)
        pool.submit(carry, right_line, left_line, lambda data: data)
        sides = [
            pool.submit(side, left, connecting, 0, Role.CONNECTS),
            pool.submit(side, right, accepting, 1, Role.ACCEPTS),
        ]
        return [one.result(FAILSAFE_SECONDS) for one in sides]


def test_two_ranks_recognise_each_other() -> None:
    assert shake(JOB, JOB) == [Identity(1, 5), Identity(0, 5)]


def test_two_versions_are_told_apart_on_both_sides() -> None:
    texts = [str(error) for error in shake(JOB, replace(JOB, version="2.0"))]
    assert texts[0].startswith(
        "rank 1 runs sirtaki 2.0, but rank 0 runs sirtaki 1.0: install the same version"
    )
    assert texts[1].startswith(
        "rank 0 runs sirtaki 1.0, but rank 1 runs sirtaki 2.0: install the same version"
    )


@given(position=st.integers(0, 165), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_one_changed_bit_is_noticed(position: int, bit: int) -> None:
    passed = 0

    def tamper(data: bytes) -> bytes:
        nonlocal passed
        changed = bytearray(data)
        if passed <= position < passed + len(data):
            changed[position - passed] ^= 1 << bit
        passed += len(data)
        return bytes(changed)

    assert all(isinstance(result, HandshakeError) for result in shake(JOB, JOB, tamper))


def test_nobody_is_taken_for_another_by_echoing_what_he_says() -> None:
    near, far = socket.socketpair()
    deadline = time.monotonic() + FAILSAFE_SECONDS

    def echo() -> None:
        with suppress(OSError), far:
            while data := far.recv(4096):
                far.sendall(data)

    with ThreadPoolExecutor(1) as pool, near:
        pool.submit(echo)
        with pytest.raises(HandshakeError):
            run_handshake(near, JOB, Identity(0, 1), LinkKind.PEERS, Role.CONNECTS, deadline)
        near.close()


def test_whoever_answers_byte_by_byte_gets_no_more_time() -> None:
    near, far = socket.socketpair()

    def drip() -> None:
        with suppress(OSError):
            for _ in range(100):
                far.sendall(b"s")
                time.sleep(0.05)

    with near, far, ThreadPoolExecutor() as pool:
        pool.submit(drip)
        with pytest.raises(RendezvousTimeout):
            run_handshake(near, JOB, Identity(0, 1), LinkKind.PEERS, Role.CONNECTS, time.monotonic() + 0.5)
        near.close()


def test_the_key_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = write_key(str(path))
    assert len(key) == 32
    assert read_key(str(path)) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert key.hex() not in repr(replace(JOB, key=key))
    with pytest.raises(FileExistsError):
        write_key(str(path))  # the existing file might be another user's, or a link
    assert read_key(str(path)) == key
    path.chmod(0o640)
    with pytest.raises(RendezvousError, match=r"others may read or write the job's key .*chmod 600"):
        read_key(str(path))
    path.chmod(0o600)
    for text in ("", "abc", "g" * 64, "0" * 62):
        path.write_text(text)
        with pytest.raises(RendezvousError, match="holds no key"):
            read_key(str(path))
    with pytest.raises(RendezvousError, match="cannot read the job's key"):
        read_key(str(tmp_path / "none"))
