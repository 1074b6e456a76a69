"""`sirtaki trace report` on a job over two hosts, one of which sends slowly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .network import Network

STEPS = 5
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
