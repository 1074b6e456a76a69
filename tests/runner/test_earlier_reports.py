"""Failure reports that an earlier job has left in the folder do not decide the verdict of the next one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from agent_conversation import values
from launching import Run

from sirtaki.runner.hosts.agent import AgentJob
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.process import REPORTS
from sirtaki.runner.launch.reaper import Reaper

RANK = """
import os, signal, sys
import sirtaki.numpy as hvd

culprit = int(sys.argv[1])
mine = int(os.environ["SIRTAKI_RANK"])
if culprit == 0 and mine == 0:
    sys.exit("no such data set")
if culprit == 0:
    signal.pause()
hvd.init()
if mine == culprit:
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(1.0, name="loss")
"""


@pytest.fixture
def old_report(tmp_path: Path) -> Path:
    """Returns the report of an earlier job, in which rank 1 blames rank 0."""
    (tmp_path / "dump").mkdir()
    file = tmp_path / "dump" / "rank1.json"
    file.write_text(json.dumps({"rank": 1, "culprit": 0, "reason": "rank 0 was lost", "status": "peer_lost"}))
    return file


def test_the_reports_of_the_first_job_say_nothing_about_the_second(hvdrun: Run, tmp_path: Path) -> None:
    (script := tmp_path / "rank.py").write_text(RANK)
    options = ("-np", "2", "--dump-directory", str(tmp_path / "dump"), sys.executable, str(script))
    first = hvdrun(*options, "1")
    assert first.returncode == 128 + 9, first
    assert [file.name for file in (tmp_path / "dump").iterdir()] == ["rank0.json"]
    second = hvdrun(*options, "0")
    assert second.returncode == 1, second
    assert "what each rank was doing" not in second.stderr
    last = second.stderr.splitlines()[-1]
    assert last.startswith("hvdrun: rank 0 (pid ")
    assert last.endswith("failed with exit code 1"), second
    assert list((tmp_path / "dump").iterdir()) == []


def test_an_agent_sends_no_report_of_an_earlier_job(old_report: Path) -> None:
    placements = [[rank, 2, rank, 2, 0, 1] for rank in range(2)]
    start = {**values("/bin/true"), "placements": placements, "additions": {REPORTS: str(old_report.parent)}}
    with Reaper() as reaper:
        job = AgentJob(start, 2, reaper)
        assert list(job.new_reports()) == []
        old_report.write_text("{}")  # by a rank of this job
        assert [frame.rank for frame in job.new_reports()] == [1]
        job.close_collector()


def test_a_report_that_cannot_be_removed_is_refused(hvdrun: Run, tmp_path: Path) -> None:
    (tmp_path / "rank0.json").mkdir()
    ended = hvdrun("-np", "1", "--dump-directory", str(tmp_path), "true")
    assert ended.returncode == 1
    assert f"cannot remove {tmp_path}/rank0.json, a failure report of an earlier job" in ended.stderr
    with Reaper() as reaper, pytest.raises(LaunchError, match="a failure report of an earlier job"):
        AgentJob({**values("/bin/true"), "additions": {REPORTS: str(tmp_path)}}, 1, reaper)
