"""A rank of a ProcessWorld: reads the names of cases from a socket and reports the result of each."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from cases import find

import sirtaki.numpy as hvd


def attempt(name: str) -> dict[str, str]:
    """Runs a case in a world of its own; returns its traceback as "error", its reason as "skipped", or ""."""
    try:
        hvd.init()
        try:
            find(name).body()
        finally:
            hvd.shutdown()
    except pytest.skip.Exception as reason:
        return {"error": "", "skipped": str(reason)}
    except BaseException:
        return {"error": traceback.format_exc(), "skipped": ""}
    return {"error": "", "skipped": ""}


def tensors() -> contextlib.AbstractContextManager[object]:
    """Places torch's tensors on GPUs of the fake libcuda, if a test asks for that."""
    gpus = int(os.environ.get("TORCH_TENSORS_ON_GPUS", "0"))
    if not gpus:
        return contextlib.nullcontext()
    from fake_gpu.tensors import FakeTensors

    return FakeTensors(gpus)


def main() -> None:
    control = socket.socket(socket.AF_UNIX)
    control.connect(sys.argv[1])
    with tensors(), control.makefile("rw") as stream:
        for line in stream:
            answer = {"rank": os.environ["SIRTAKI_RANK"], **attempt(json.loads(line))}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


main()
