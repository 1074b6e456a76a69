"""Runs a program of torch with its tensors on GPUs of the fake libcuda, one for each slot.

With KERNEL_FAULT=WORKER:COUNT this worker is killed when so many of its NCCL kernels have begun.

Usage: on_gpus.py GPUS PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fake_gpu import FakeGpu
from fake_gpu.tensors import FakeTensors


def kill_in_kernel(fake: FakeGpu, count: int) -> None:
    while fake.calls("ncclKernel") < count:
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    gpus, program = int(sys.argv[1]), Path(__file__).with_name(sys.argv[2])
    sys.argv = [str(program), *sys.argv[3:]]
    worker, _, count = os.environ.get("KERNEL_FAULT", "").partition(":")
    with FakeTensors(gpus) as tensors:
        if worker == os.environ.get("SIRTAKI_WORKER", "0"):
            threading.Thread(target=kill_in_kernel, args=(tensors.fake, int(count)), daemon=True).start()
        runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
