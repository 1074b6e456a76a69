"""An end of the streams of benchmarks/zero_copy.py.

Usage: python zero_copy.py receive PORT CONNECTIONS
       python zero_copy.py send HOST:PORT CONNECTIONS BYTES_EACH plain|"zero copy"
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

PIECE = 1 << 20
PATIENCE = 10.0  # seconds, for the last notifications
# Numbers of Linux (socket.h, errqueue.h).
SO_ZEROCOPY, MSG_ZEROCOPY, CODE_COPIED = 60, 0x4000000, 1
EXTENDED_ERROR = struct.Struct("=IBBBBII")  # sock_extended_err: errno, origin, type, code, pad, info, data


class Counts:
    """Counts of one connection's thread."""

    def __init__(self) -> None:
        self.bytes = self.calls = self.notices = self.copied = 0


def receive(connection: socket.socket, counts: Counts) -> None:
    space = bytearray(PIECE)
    while count := connection.recv_into(space):
        counts.bytes += count
        counts.calls += 1


def send(connection: socket.socket, counts: Counts, total: int, flags: int) -> None:
    """Sends bytes. With MSG_ZEROCOPY, the kernel says of each call when it needs them no more."""
    data = memoryview(bytes(PIECE))
    awaited = 0
    while counts.bytes < total:
        try:
            counts.bytes += connection.send(data[: total - counts.bytes], flags)
        except OSError as error:
            if not flags or error.errno != errno.ENOBUFS:  # too many calls are not acknowledged
                raise
            awaited -= take_notices(connection, counts, 1.0)
            continue
        counts.calls += 1
        if flags:
            awaited += 1 - take_notices(connection, counts, 0.0)
    connection.shutdown(socket.SHUT_WR)
    until = time.monotonic() + PATIENCE
    while awaited and time.monotonic() < until:
        awaited -= take_notices(connection, counts, 1.0)


def take_notices(connection: socket.socket, counts: Counts, seconds: float) -> int:
    """Reads the kernel's notifications, after waiting for one; returns of how many calls they are."""
    waiter = select.poll()
    waiter.register(connection, 0)  # errors are always reported
    waiter.poll(seconds * 1000)
    calls = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            _, ancillary, _, _ = connection.recvmsg(0, 256, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            for _, _, content in ancillary:
                _, _, _, code, _, first, last = EXTENDED_ERROR.unpack_from(content)
                calls += last - first + 1
                counts.copied += (last - first + 1) * (code == CODE_COPIED)
    counts.notices += calls
    return calls


def run(works: Sequence[Callable[[], None]]) -> float:
    """Does the works in threads; returns the seconds."""
    threads = [threading.Thread(target=work) for work in works]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def main(role: str, place: str, connections: str, each: str = "0", way: str = "plain") -> None:
    counts = [Counts() for _ in range(int(connections))]
    works: list[Callable[[], None]] = []
    with contextlib.ExitStack() as opened:
        if role == "receive":
            listener = opened.enter_context(socket.create_server(("0.0.0.0", int(place))))
            print("listening", flush=True)
            for one in counts:
                end = opened.enter_context(listener.accept()[0])
                works.append(lambda end=end, one=one: receive(end, one))
        else:
            host, port = place.split(":")
            flags = MSG_ZEROCOPY if way == "zero copy" else 0
            for one in counts:
                end = opened.enter_context(socket.create_connection((host, int(port))))
                if flags:
                    end.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
                works.append(lambda end=end, one=one: send(end, one, int(each), flags))
        used = time.process_time()
        seconds = run(works)
    numbers = {name: sum(getattr(one, name) for one in counts) for name in vars(Counts())}
    print(json.dumps({**numbers, "seconds": seconds, "processor": time.process_time() - used}))


if __name__ == "__main__":
    main(*sys.argv[1:])
