"""`sirtaki trace report` on jobs with a slow link, and with a clock of another machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, HVDRUN

from .network import Network

STEPS = 5
AHEAD = 3600  # seconds
SHIFTED = ["unshare", "--time", "--monotonic", str(AHEAD), "--boottime", str(AHEAD), "--fork"]
TRAINING = f"""
import numpy as np
import sirtaki.numpy as hvd

hvd.init()
for step in range({STEPS}):
    hvd.allreduce(np.ones(1_000_000, np.float32), name="gradient")
"""


def test_a_slow_link_makes_slow_transfers(fragile: Network, tmp_path: Path) -> None:
    first, second = fragile.hosts
    second.limit("100mbit")  # 4 MB take 0.32 s
    script, timeline = tmp_path / "train.py", tmp_path / "t.json"
    script.write_text(TRAINING)
    job = ("-m", "sirtaki.runner", "-H", "hosta:1,hostb:1", "--timeline-filename", timeline)
    code, _, errors = first.run(sys.executable, *job, sys.executable, script)
    assert code == 0, errors
    code, output, errors = first.run(sys.executable, "-m", "sirtaki", "trace", "report", timeline, "--json")
    assert code == 0, errors
    report = json.loads(output)
    causes = [(step["critical_rank"], step["cause"]) for step in report["steps"]]
    assert len(causes) == STEPS
    assert causes.count((None, "slow transfer")) > STEPS / 2, causes
    assert report["tensors"][0]["transfer_p50_seconds"] > 0.1
    assert "slow-transfer" in {one["rule"] for one in report["findings"]}


def test_the_offset_of_another_clock_is_found_within_its_error(tmp_path: Path) -> None:
    if not shutil.which("unshare") or subprocess.run([*SHIFTED, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no time namespaces")
    script, timeline = tmp_path / "train.py", tmp_path / "t.json"
    script.write_text(TRAINING)
    shifted = f'[ "$SIRTAKI_RANK" = 1 ] && exec {" ".join(SHIFTED)} "$@"; exec "$@"'
    job = ["env", f"SIRTAKI_TIMELINE={timeline}", *HVDRUN, "-np", "2"]
    job += ["sh", "-c", shifted, "sh", sys.executable, str(script)]
    ended = subprocess.run(job, capture_output=True, text=True, timeout=FAILSAFE_SECONDS)
    assert ended.returncode == 0, ended
    command = [sys.executable, "-m", "sirtaki", "trace", "report", str(timeline), "--json"]
    _, clock = json.loads(subprocess.run(command, capture_output=True, timeout=FAILSAFE_SECONDS).stdout)[
        "clocks"
    ]
    assert clock["ranks"] == [1]
    assert 0 < clock["error_seconds"] < 1
    assert abs(clock["offset_seconds"] + AHEAD) <= clock["error_seconds"] + 1e-9
