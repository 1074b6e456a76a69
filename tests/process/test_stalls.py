"""Reports about a rank that others wait for: the position of its program, in words and as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from pathlib import Path

from process_world import run_program

HEAD = """
import ctypes, os, signal, sys, threading, time
import numpy as np
import sirtaki.numpy as hvd
"""


def run(
    tmp_path: Path, body: str, ranks: int = 2, before_init: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    source = HEAD + textwrap.dedent(before_init) + "hvd.init()\n" + textwrap.dedent(body)
    return run_program(tmp_path, source, ranks, SIRTAKI_STALL_REPORT="1", **environment)


def reports(ended: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in ended.stderr.splitlines() if "not submitted" in line]


def test_a_late_rank_is_found_in_its_program_though_it_holds_the_interpreters_lock(tmp_path: Path) -> None:
    file = tmp_path / "stalls.json"
    ended = run(
        tmp_path,
        """
        def evaluate():
            ctypes.PyDLL(None).usleep(1_700_000)

        def train():
            if hvd.rank() == 2:
                evaluate()
            hvd.allreduce(1.0, name="loss")

        train()
        """,
        3,
        SIRTAKI_STALL_REPORT_FILE=str(file),
    )
    assert ended.returncode == 0, ended
    (line,) = reports(ended)
    assert "ranks 0 and 1 wait for 'loss'" in line
    where = r"is in evaluate\(\) at train\.py:\d+"
    assert re.search(rf"rank 2 \(pid \d+ on .+\) has not submitted it and {where}", line)
    (report,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (report["tensors"], report["waiting"], report["seconds"]) == (["loss"], [0, 1], 1)
    (missing,) = report["missing"]
    assert (missing["rank"], missing["answers"], missing["waits_for"]) == (2, True, "")
    assert [frame["function"] for frame in missing["stack"]] == ["evaluate", "train", "<module>"]


def test_ranks_that_wait_for_each_other_are_told_so(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        def step(first, second):
            try:
                hvd.allreduce(1.0, name=first)
            except hvd.HorovodInternalError as error:
                print(f"heard: {error}", flush=True)
                os._exit(1)

        step(*(("loss", "accuracy") if hvd.rank() == 0 else ("accuracy", "loss")))
        """,
    )
    waits = r"has not submitted it: it waits for '{}' in step\(\) at train\.py:\d+"
    for waiting, other in (("loss", "accuracy"), ("accuracy", "loss")):
        found = [line for line in reports(ended) if f"waits for '{waiting}'; " in line]
        assert re.search(waits.format(other), found[0]), ended.stderr
        assert "different branches" in found[0]
    heard = [line for line in ended.stdout.splitlines() if "heard: " in line]
    assert heard, ended
    assert all(
        "(ranks wait for each other)" in line and re.search(waits.format("(loss|accuracy)"), line)
        for line in heard
    )


def test_a_signal_that_the_program_uses_is_left_alone(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        assert len(heard) == 0
        if hvd.rank() == 1:
            time.sleep(1.7)
        hvd.allreduce(1.0, name="loss")
        assert len(heard) == 0
        signal.raise_signal(signal.SIGRTMAX - 1)
        assert len(heard) == 1
        """,
        before_init="""
        heard = []
        signal.signal(signal.SIGRTMAX - 1, lambda number, frame: heard.append(number))
        """,
    )
    assert ended.returncode == 0, ended
    (line,) = reports(ended)
    assert "and is at train.py:" in line
