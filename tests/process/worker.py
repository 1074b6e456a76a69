"""A rank of a ProcessWorld: reads the names of cases from a socket and reports the result of each."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from cases import find
from fake_gpu import tensors_on_gpus
from gpu.card import name_own_host
from process_world import PATIENCE

import sirtaki.numpy as hvd


def attempt(name: str) -> dict[str, str]:
    """Runs a case in a world of its own; returns its traceback as "error", its reason as "skipped", or ""."""
    faulthandler.dump_traceback_later(0.9 * PATIENCE)  # of all threads, to the output of the world
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
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {"error": "", "skipped": ""}


def main() -> None:
    control = socket.socket(socket.AF_UNIX)
    control.connect(sys.argv[1])
    name_own_host()
    with tensors_on_gpus(), control.makefile("rw") as stream:
        for line in stream:
            answer = {"rank": os.environ["SIRTAKI_RANK"], **attempt(json.loads(line))}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


main()
