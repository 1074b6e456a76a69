"""The connections of an elastic job while hvdrun is busy with its own orders."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path

from launching import FAILSAFE_SECONDS, wait_until

from sirtaki.bindings._version import VERSION
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.rendezvous.elastic.messages import Enlist, Message, pack
from sirtaki.runner.rendezvous.elastic.process import workers_job
from sirtaki.runner.rendezvous.job import Identity, Job
from sirtaki.runner.rendezvous.rendezvous_client import RendezvousClient


def test_workers_are_answered_at_once_and_their_messages_are_kept(tmp_path: Path) -> None:
    job = Job("job", 1, secrets.token_bytes(32), VERSION)
    received: list[tuple[int, Message]] = []
    post = Post(job, str(tmp_path), (), lambda *message: received.append(message), lambda _: None)
    sent = threading.Event()

    def be_worker() -> None:
        client = RendezvousClient.connect(post.address, workers_job("job", job.key), Identity(7), 60.0)
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
