"""`hvd.elastic.fence`: a rank may go on to write, a process that was given up may not."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator

import pytest
from elastic.arbiter_job import Job as ArbitersJob
from elastic.running import QUICK, check_exact, run_job

import sirtaki.numpy as hvd
from sirtaki.bindings.bootstrap.connection.wire import Frame
from sirtaki.bindings.bootstrap.elastic import worker as workers
from sirtaki.bindings.bootstrap.elastic.messages import (
    Counted,
    Drain,
    End,
    Fence,
    Message,
    Standing,
    pack,
    unpack,
)
from sirtaki.bindings.bootstrap.job import Identity, Job
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.bindings.errors import ForkedError, HorovodInternalError
from sirtaki.runner.elastic.arbiter.model import Kill, Send

Answer = Callable[[Fence], Standing | None]


@pytest.fixture
def worker_of() -> Iterator[Callable[[Answer], workers.ElasticWorker]]:
    """Yields a function that returns a worker, whose questions this answer gets."""
    servers: list[RendezvousServer] = []

    def make(answer: Answer) -> workers.ElasticWorker:
        job = Job(f"fencing.{secrets.token_hex(4)}", 8, b"k" * 32, "1")

        def take(number: int, frame: Frame) -> None:
            message = unpack(frame)
            assert isinstance(message, Fence)
            if (standing := answer(message)) is not None:
                server.send_message(number, pack(standing))

        server = RendezvousServer(f"unix:@{job.id}", job, on_message=take).start()
        servers.append(server)
        return workers.ElasticWorker(RendezvousClient.connect(server.address, job, Identity(3), 30.0), 3)

    yield make
    for server in servers:
        server.close()


def test_each_question_gets_its_own_answer(worker_of: Callable[[Answer], workers.ElasticWorker]) -> None:
    asked: list[int] = []

    def answer(message: Fence) -> Standing:
        asked.append(message.question)
        return Standing(message.generation, message.question, len(asked) < 3)

    worker = worker_of(answer)
    worker.fence()
    worker.fence()
    with pytest.raises(HorovodInternalError, match="no rank of the job any more"):
        worker.fence()
    assert asked == [0, 1, 2]


def test_a_late_answer_to_another_question_does_not_count(
    worker_of: Callable[[Answer], workers.ElasticWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_ANSWER_SECONDS", 0.2)
    worker = worker_of(lambda message: Standing(1, message.question - 1, True))
    with pytest.raises(HorovodInternalError, match="hvdrun has not answered"):
        worker.fence()


def test_questions_of_several_threads_are_sent_in_their_order(
    worker_of: Callable[[Answer], workers.ElasticWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer to an earlier question would otherwise replace the one that another thread waits for."""
    worker = worker_of(lambda message: Standing(1, message.question, True))
    sent: list[int] = []
    other, has_sent, send = threading.Thread(target=worker.fence), threading.Event(), worker._send

    def send_later(message: Message) -> None:
        assert isinstance(message, Fence)
        if message.question == 0:
            other.start()
            has_sent.wait(0.5)  # it does not
        sent.append(message.question)
        send(message)
        has_sent.set()

    monkeypatch.setattr(worker, "_send", send_later)
    worker.fence()
    other.join()
    assert sent == [0, 1]


def test_a_worker_that_was_told_to_end_asks_whether_others_go_on(
    worker_of: Callable[[Answer], workers.ElasticWorker],
) -> None:
    answers = [True, False]
    worker = worker_of(lambda message: Standing(1, message.question, answers[message.question]))
    worker._take(End(1, "the job was ended"))
    worker.fence()
    with pytest.raises(HorovodInternalError, match="it has left"):
        worker.fence()


def test_without_hvdrun_nobody_writes(worker_of: Callable[[Answer], workers.ElasticWorker]) -> None:
    worker = worker_of(lambda _: None)
    worker.close()
    with pytest.raises(HorovodInternalError, match="is gone"):
        worker.fence()


def test_without_hvdrun_nobody_trains_on(worker_of: Callable[[Answer], workers.ElasticWorker]) -> None:
    worker = worker_of(lambda _: None)
    worker.check(lambda: None)
    worker._note_gone("the other side closed the connection")
    with pytest.raises(HorovodInternalError, match="is gone"):
        worker.check(lambda: None)


def test_the_arbiter_refuses_a_rank_that_it_has_given_up() -> None:
    job = ArbitersJob(start=3, slots=3).trains()
    assert job.receives(1, Fence(1, 7)) == [Send(1, Standing(1, 7, True))]
    text = "rank 1 is late"
    orders = job.leaves(0, "lost", 2, kind="timeout", culprit=1, text=text)
    assert Kill(1) in orders
    assert job.receives(1, Fence(1, 8)) == [Send(1, Standing(1, 8, False))]
    assert job.receives(0, Fence(1, 0)) == [Send(0, Standing(1, 0, True))]  # it has left, and is not given up


def test_the_arbiter_answers_each_worker() -> None:
    job = ArbitersJob(start=2, slots=3)
    assert job.receives(1, Fence(0, 0)) == [Send(1, Standing(0, 0, True))]  # before its training begins
    job.trains()
    job.receives(1, Drain(1))
    job.receives(0, Counted(1, 1, 3))
    job.receives(1, Counted(1, 1, 3))
    for one in (0, 1):
        job.leaves(one, "changed", 4)
    assert job.receives(1, Fence(1, 1)) == [Send(1, Standing(1, 1, False))]  # it has left
    job.arbiter.stop()
    assert job.receives(0, Fence(2, 0)) == [Send(0, Standing(2, 0, True))]  # nobody goes on without it


def test_a_process_that_was_forked_cannot_ask() -> None:
    hvd.init()
    child = os.fork()
    if not child:
        try:
            hvd.elastic.fence()
        except ForkedError:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    hvd.shutdown()
    assert os.waitstatus_to_exitcode(status) == 3


def test_ranks_ask_at_each_step_and_at_the_end() -> None:
    options = ("-np", "3", "--min-np", "1", *QUICK)
    job = run_job(options, "numpy_training.py", 60, 0.01, "1:step:4", HOLD="8:3", FENCE="1")
    check_exact(job, 60, {0, 2, 3})


def test_one_process_alone_is_never_fenced() -> None:
    hvd.init()
    hvd.elastic.fence()
    hvd.shutdown()
