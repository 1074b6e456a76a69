"""The GPU of a step's program: a real one, or the fakes' where TORCH_TENSORS_ON_GPUS is set (a dry run).

Torch is imported late: the table of the steps (table.py) needs the marks alone.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # fake_gpu

FIGURE, SKIPPED = "FIGURE ", "SKIPPED: "  # how lines of a step's log begin, for its table
IS_DRY_RUN = "TORCH_TENSORS_ON_GPUS" in os.environ
MIB = 1 << 20


def report(**figures: Any) -> None:
    """Adds figures to the step's row of the table; a name ends with the unit: `first_operation_ms`."""
    print(FIGURE + json.dumps(figures), flush=True)


def skip(reason: str) -> None:
    """Marks the step as skipped. The program returns afterwards, with exit code 0."""
    print(SKIPPED + reason, flush=True)


def name_own_host() -> None:
    """Makes NCCL take each rank to be on a host of its own, to share a GPU, if a test asks for it."""
    if "NCCL_HOST_PER_RANK" in os.environ:
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['SIRTAKI_RANK']}"


def milliseconds_since(start: float) -> float:
    return round((time.perf_counter() - start) * 1e3, 3)


class Card(Protocol):
    """Operations on a GPU that programs need beside torch's tensors."""

    device: torch.device

    def work_for(self, seconds: float) -> None:
        """Adds a kernel that runs so long to the current stream."""

    def synchronize(self) -> None:
        """Waits for all work on the GPU."""

    def capture(self, seconds: float) -> None:
        """Captures a CUDA graph in mode global, which takes so long; raises if that was disturbed."""

    def start_counting_memory(self) -> None: ...

    def most_memory(self) -> float | None:
        """Returns the most MiB allocated since the count was started; None: unknown."""


class RealCard:
    """torch's current GPU."""

    def __init__(self, number: int) -> None:
        import torch

        torch.cuda.set_device(number)
        self._torch, self.device = torch, torch.device("cuda", number)
        self._cycles = 0.0  # per second
        self._captured = torch.zeros(1, device=self.device)
        self._captured.add_(1).zero_()  # loads kernels: a capture must not, and would wait for others' work

    def work_for(self, seconds: float) -> None:
        if not self._cycles:
            self._cycles = self._measure_cycles()
        self._torch.cuda._sleep(int(seconds * self._cycles))

    def _measure_cycles(self) -> float:
        count, (start, end) = 50_000_000, [self._torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._torch.cuda._sleep(count)  # the first call loads the kernel
        start.record()
        self._torch.cuda._sleep(count)
        end.record()
        end.synchronize()
        return count / start.elapsed_time(end) * 1e3

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def capture(self, seconds: float) -> None:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):  # torch.cuda.graph() would first wait for the whole GPU
            graph.capture_begin(capture_error_mode="global")
            self._captured.add_(1)
            time.sleep(seconds)
            graph.capture_end()
        graph.replay()
        assert self._captured.item() == 1, self._captured

    def start_counting_memory(self) -> None:
        gc.collect()
        self._torch.cuda.empty_cache()
        self._torch.cuda.reset_peak_memory_stats()

    def most_memory(self) -> float:
        return round(self._torch.cuda.max_memory_allocated() / MIB, 1)


class FakeCard:
    """A GPU of the fakes. Its kernels are times in which its stream is held."""

    def __init__(self, tensors: Any, number: int) -> None:
        import torch

        self.device, self._number = torch.device("cpu"), number
        self._fake, self._driver = tensors.fake, tensors.driver
        self._driver.stream(number)

    def work_for(self, seconds: float) -> None:
        stream = self._driver.stream(self._number)
        self._fake.hold(stream, True)
        threading.Timer(seconds, self._fake.hold, (stream, False)).start()

    def synchronize(self) -> None:
        self._driver.wait_for(self._number, self._driver.stream(self._number))

    def capture(self, seconds: float) -> None:
        self._fake.set("capturing", 1)
        time.sleep(seconds)
        self._fake.set("capturing", 0)
        assert not self._fake.misuse(), self._fake.misuse()

    def start_counting_memory(self) -> None: ...

    def most_memory(self) -> None:
        return None


@contextmanager
def own_card(local_rank: int) -> Iterator[Card]:
    """Returns the GPU of a rank; ranks share GPUs if there are fewer."""
    import torch
    from fake_gpu import tensors_on_gpus

    name_own_host()
    with tensors_on_gpus() as tensors:
        number = local_rank % max(torch.cuda.device_count(), 1)
        yield RealCard(number) if tensors is None else FakeCard(tensors, number)
