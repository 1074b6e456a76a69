"""Elastic training with torch on the fakes' GPUs, through NCCL, with ranks as threads and as processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from fake_gpu import needs_fake

torch = pytest.importorskip("torch")

from cases.torch_models import fill  # noqa: E402  # it imports torch
from elastic.running import QUICK, Ended, check_replayed, run_job  # noqa: E402
from elastic.torch_job import (  # noqa: E402
    Job,
    Worker,
    assert_equal,
    batch,
    content,
    one_thread,
)
from fake_gpu.tensors import PATIENCE, FakeTensors  # noqa: E402
from torch import nn  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.bindings.context import Context, current  # noqa: E402
from sirtaki.common.elastic.state import GenerationStart  # noqa: E402

__all__ = ["one_thread"]  # a fixture that applies to all tests here
pytestmark = needs_fake
SAMPLES = 60


def make(worker: Worker, *, by_hand: bool = False) -> None:
    worker.model = fill(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), 0)
    plain = torch.optim.SGD(worker.model.parameters(), lr=0.1, momentum=0.9)
    worker.optimizer = plain if by_hand else hvd.DistributedOptimizer(plain)
    worker.state = hvd.elastic.TorchState(worker.model, worker.optimizer, batch=0)


def take_step(worker: Worker, *, by_hand: bool = False) -> None:
    """Takes a step, and commits."""
    worker.optimizer.zero_grad()
    worker.model(batch(worker.state.batch)).square().mean().backward()
    if by_hand:
        hvd.grouped_allreduce_([parameter.grad for parameter in worker.model.parameters()])
    worker.optimizer.step()
    worker.state.batch += 1
    worker.state.commit()


def content_of(worker: Worker) -> Any:
    return content(worker.model), content(worker.optimizer)


def abort_once_launched(fake: Any, context: Context, kernels: int) -> threading.Thread:
    """Aborts the world when so many NCCL kernels have begun, from another thread."""

    def abort() -> None:
        while fake.calls("ncclKernel") < kernels:
            time.sleep(0.001)
        context.abort("a peer is gone")

    started = threading.Thread(target=abort)
    started.start()
    return started


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_collective_that_fails_after_its_launch_changes_nothing(by_hand: bool) -> None:
    """No optimizer uses gradients that have not arrived, and no commit counts them."""
    all_here = threading.Barrier(2, timeout=PATIENCE)

    def function(worker: Worker) -> Any:
        worker.state.receive(GenerationStart(current(), hvd.rank() == 0, False))
        for _ in range(4):
            take_step(worker, by_hand=by_hand)
        before = content_of(worker)
        all_here.wait()
        if hvd.rank() == 0:
            tensors.fake.set("hang", 1)
            aborting = abort_once_launched(tensors.fake, current(), tensors.fake.calls("ncclKernel") + 2)
        all_here.wait()
        with pytest.raises(hvd.HorovodInternalError, match="a peer is gone"):
            take_step(worker, by_hand=by_hand)
        if hvd.rank() == 0:
            aborting.join()
        assert worker.state.batch == 4
        assert_equal(content_of(worker), before)
        assert worker.state.can_restore()
        worker.state.restore()
        assert_equal(content_of(worker), before)
        return before[0]

    job = Job(lambda worker: make(worker, by_hand=by_hand))
    with FakeTensors(2) as tensors:
        first, second = job.run(2, function, gpu_backend="nccl")
        assert_equal(first, second)
        tensors.fake.set("hang", 0)


def check(job: Ended, workers: set[int]) -> None:
    """Checks that these workers have come to the end with the weights of one process, through NCCL."""
    check_replayed(job, SAMPLES, 1, workers, 1e-9)
    assert "through the memory of the host" not in job.text


FAULTS = [
    (0, "kernel"),
    (1, "exchanged"),
    (0, "step"),
    (1, "kernel"),
]


@pytest.mark.parametrize(("victim", "fault"), FAULTS)
def test_a_process_with_a_gpu_is_lost(victim: int, fault: str) -> None:
    """The survivors go on, on their GPUs; a rank that takes the place of the lost one uses its GPU."""
    in_program = () if fault == "kernel" else (f"{victim}:{fault}:6",)
    in_kernel = {"KERNEL_FAULT": f"{victim}:14"} if fault == "kernel" else {}
    options = ("-np", "3", "--min-np", "2", *QUICK)
    job = run_job(
        *(options, "on_gpus.py", 3, "torch_training.py", SAMPLES, *in_program),
        HOLD="12:3",
        SIRTAKI_GPU_BACKEND="nccl",
        **in_kernel,
    )
    check(job, {0, 1, 2, 3} - {victim})
    assert f"rank {victim} was lost" in job.text


def test_generations_leave_nothing_on_the_gpus() -> None:
    def train(worker: Worker) -> Any:
        worker.state.receive(GenerationStart(current(), hvd.rank() == 0, False))
        for _ in range(3):
            take_step(worker)
        assert hvd.allgather(torch.ones(1)).tolist() == [1.0] * hvd.size()
        return content_of(worker)

    job = Job(make)

    def alive_after(sizes: tuple[int, ...]) -> int:
        """Returns the number of objects on the GPUs after worlds of these sizes, in one that uses no GPU."""
        for size in sizes:
            results = job.run(size, train, gpu_backend="nccl")
            for one in results[1:]:
                assert_equal(one, results[0])
        job.run(3, lambda worker: None)
        return tensors.fake.alive()

    with FakeTensors(3) as tensors:
        before = alive_after((3,))  # the streams of torch, which this test does not count
        sizes = (1, 2, 1, 3, 1, 2, 1, 3)
        assert alive_after(sizes) == before
        fake = tensors.fake
        made = fake.calls("ncclCommInitRankConfig")
        assert made == fake.calls("ncclCommDestroy") == 3 + sum(sizes)
