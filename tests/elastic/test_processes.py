"""The ends of an elastic job's workers on this host, with a stand-in for a process."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

from launching import FAILSAFE_SECONDS, wait_until

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.elastic.messages import Enlist, Message, Returned, pack
from sirtaki.bindings.bootstrap.job import Identity, Job, job_of_workers
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.runner.elastic.arbiter.model import Slot
from sirtaki.runner.elastic.job import Processes
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.supervise.failure_analysis import ExitStatus

WORKER = 7


class Ended:
    """A process that has ended with exit code 0."""

    def check(self) -> ExitStatus:
        return ExitStatus(0, 0, 0)


def test_the_end_of_a_worker_follows_its_last_message_even_if_that_was_not_read_before(
    tmp_path: Path,
) -> None:
    """Lets a worker send its last message, and end, after the connections were served."""
    job = Job(secrets.token_hex(8), 1, secrets.token_bytes(32), VERSION)
    received: list[Message] = []
    post = Post(job, str(tmp_path), (), lambda _, message: received.append(message), lambda _: None)
    served, sent, may_close = threading.Event(), threading.Event(), threading.Event()

    def be_worker() -> None:
        client = RendezvousClient.connect(post.address, job_of_workers(job), Identity(WORKER), 60.0)
        client.send_message(pack(Enlist(0, "new")), time.monotonic() + FAILSAFE_SECONDS)
        served.wait(FAILSAFE_SECONDS)
        client.send_message(pack(Returned(1)), time.monotonic() + FAILSAFE_SECONDS)
        sent.set()
        may_close.wait(FAILSAFE_SECONDS)  # a child of the worker may keep the connection open
        client.close()

    worker = threading.Thread(target=be_worker, daemon=True)
    worker.start()

    def has_enlisted() -> bool:
        post.serve()
        return received == [Enlist(0, "new")]

    wait_until(has_enlisted, "the worker has enlisted")
    served.set()
    assert sent.wait(FAILSAFE_SECONDS)
    unused: Any = None
    processes = Processes(unused, 1, post, unused, unused)
    process: Any = Ended()
    processes.running[WORKER], processes._all[WORKER] = Slot("localhost", 0), process
    ends = list(processes.ended(time.monotonic()))
    post.deliver()
    assert [worker for worker, *_ in ends] == [WORKER]
    assert received == [Enlist(0, "new"), Returned(1)]
    may_close.set()
    worker.join(FAILSAFE_SECONDS)
    post.close()
