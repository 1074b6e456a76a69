"""sirtaki.spark.run with two executors, each a process of its own, and what holds without a session."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import sirtaki.numpy as hvd

MASTER = "local-cluster[2,1,512]"


def test_ranks_on_several_executors(spark: Any) -> None:
    import sirtaki.spark

    def work() -> tuple[int, int, float, int]:
        hvd.init()
        return hvd.rank(), hvd.local_rank(), float(hvd.allreduce([2.0], op=hvd.Sum)[0]), os.getppid()

    results = sirtaki.spark.run(work, num_proc=2)  # the second executor may have yet to register
    assert [one[:3] for one in results] == [(0, 0, 4.0), (1, 1, 4.0)]
    assert len({one[3] for one in results}) == 2  # each executor has a parent of Python workers


def test_executors_that_come_and_go(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sirtaki.spark

    configuration = spark.sparkContext.getConf().set("spark.dynamicAllocation.enabled", "true")
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: configuration)
    with pytest.raises(sirtaki.RunError, match=r"set spark\.dynamicAllocation\.enabled=false"):
        sirtaki.spark.run(print, num_proc=2)


def test_an_executor_that_is_lost(spark: Any) -> None:
    import sirtaki.spark

    def work() -> None:
        import signal

        import psutil

        hvd.init()
        if hvd.rank() == 1:
            java = next(one for one in psutil.Process().parents() if "java" in one.name())
            java.send_signal(signal.SIGKILL)
        hvd.allreduce([1.0])

    with pytest.raises(sirtaki.RunError, match=r"the task of partition 1 was lost, and Spark has ended"):
        sirtaki.spark.run(work, num_proc=2)


def test_there_is_no_session(pyspark: Any) -> None:
    program = "import sirtaki.spark\nsirtaki.spark.run(print)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RunError: there is no active Spark session in this process" in done.stderr
