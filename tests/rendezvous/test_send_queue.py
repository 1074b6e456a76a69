"""Bytes that wait for non-blocking connections: their order, and that large ones are not copied."""

from __future__ import annotations

import socket
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.bindings.bootstrap.connection.wire import SHARED_BYTES, SendQueue

Parts = st.lists(
    st.integers(0, 3 * SHARED_BYTES) | st.sampled_from([0, 1, SHARED_BYTES - 1, SHARED_BYTES, 500_000]),
    max_size=8,
)


@given(sizes=Parts)
@settings(deadline=None)
def test_a_slow_reader_receives_all_bytes_in_order(sizes: list[int]) -> None:
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.setblocking(False)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        queue, received = SendQueue(), b""
        assert not queue
        for part in parts:
            queue += part
        assert queue.size == sum(sizes)
        while queue:
            queue.send(sender)
            assert queue.size >= 0
            received += receiver.recv(100_000) if sum(sizes) > len(received) else b""
        assert queue.size == 0
        sender.close()
        while data := receiver.recv(100_000):
            received += data
    assert received == b"".join(parts)


def test_queues_share_the_bytes_of_a_large_message() -> None:
    message = bytes(1 << 20)
    queues = [SendQueue() for _ in range(64)]
    tracemalloc.start()
    try:
        for queue in queues:
            queue += b"header"
            queue += message
        assert tracemalloc.get_traced_memory()[1] < len(message) // 4
    finally:
        tracemalloc.stop()
    assert {queue.size for queue in queues} == {len(b"header") + len(message)}
    for queue in queues:
        queue.clear()
        assert (bool(queue), queue.size) == (False, 0)
