"""The connections of an elastic job while hvdrun is busy with its own orders."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path

from launching import FAILSAFE_SECONDS, wait_until

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.elastic.messages import Enlist, Message, World, pack
from sirtaki.bindings.bootstrap.elastic.worker import ElasticWorker
from sirtaki.bindings.bootstrap.job import Identity, Job, job_of_workers
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.runner.elastic.post import Post


def test_workers_are_answered_at_once_and_their_messages_are_kept(tmp_path: Path) -> None:
    job = Job(secrets.token_hex(8), 1, secrets.token_bytes(32), VERSION)
    received: list[tuple[int, Message]] = []
    post = Post(job, str(tmp_path), (), lambda *message: received.append(message), lambda _: None)
    sent = threading.Event()

    def be_worker() -> None:
        client = RendezvousClient.connect(post.address, job_of_workers(job), Identity(7), 60.0)
        client.send_message(pack(Enlist(0, "new")), time.monotonic() + FAILSAFE_SECONDS)
        sent.set()

    worker = threading.Thread(target=be_worker, daemon=True)
    worker.start()

    def answer() -> bool:
        post.answer()
        return sent.is_set()

    wait_until(answer, "the worker has sent its message")
    worker.join(FAILSAFE_SECONDS)

    def has_come() -> bool:
        post.answer()
        return (due := post.due) is not None and due <= time.monotonic()

    wait_until(has_come, "the message has come")
    assert received == []
    post.serve()
    assert received == [(7, Enlist(0, "new"))]
    post.close()


def test_messages_keep_their_order_while_one_starts_a_worker(tmp_path: Path) -> None:
    """The worker sends more, and leaves, while its first message is handled."""
    job = Job(secrets.token_hex(8), 1, secrets.token_bytes(32), VERSION)
    received: list[str] = []
    begun, left = threading.Event(), threading.Event()

    def handle(_: int, message: Message) -> None:
        assert isinstance(message, Enlist)
        received.append(message.reason)
        if message.reason == "first":  # starts a worker
            begun.set()

            def answer() -> bool:
                post.answer()
                return left.is_set() and not post.is_connected(7)

            wait_until(answer, "the worker has left")

    post = Post(job, str(tmp_path), (), handle, lambda _: None)

    def be_worker() -> None:
        client = RendezvousClient.connect(post.address, job_of_workers(job), Identity(7), 60.0)
        for why in ("first", "second"):
            client.send_message(pack(Enlist(0, why)), time.monotonic() + FAILSAFE_SECONDS)
        begun.wait(FAILSAFE_SECONDS)
        client.send_message(pack(Enlist(0, "third")), time.monotonic() + FAILSAFE_SECONDS)
        client.close()
        left.set()

    worker = threading.Thread(target=be_worker, daemon=True)
    worker.start()

    def serve() -> bool:
        post.serve()
        return len(received) == 3

    wait_until(serve, "all messages have been delivered")
    worker.join(FAILSAFE_SECONDS)
    assert received == ["first", "second", "third"]
    post.close()


def test_a_worker_gets_its_place_among_thousands_with_long_names(tmp_path: Path) -> None:
    """The arbiter describes all members to each: a description has no limit of a few kilobytes."""
    slots = [f"{'a-long-name-of-a-host' * 3}-{rank // 8}:{rank % 8}" for rank in range(4096)]
    ranks = list(range(len(slots)))
    world = World(2, 7, slots, ranks, len(slots), "job.2", "unix:@x", 17, ranks, 0, "rank 9 was lost", 1)
    job = Job(secrets.token_hex(8), 1, secrets.token_bytes(32), VERSION)
    post = Post(job, str(tmp_path), (), lambda number, _: post.send(number, world), lambda _: None)
    taken: list[World] = []

    def be_worker() -> None:
        client = RendezvousClient.connect(post.address, job_of_workers(job), Identity(7), 60.0)
        taken.append(ElasticWorker(client, 7).enlist(Enlist(0, "new")))

    worker = threading.Thread(target=be_worker, daemon=True)
    worker.start()

    def has_ended() -> bool:
        post.serve()
        return not worker.is_alive()

    wait_until(has_ended, "the worker has its place")
    assert taken == [world]
    post.close()
