"""The programs of the page about hangs and wrong results of 2026 print what the page quotes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, free_address, hvdrun

from sirtaki.runner.cli import commands

from .pages import path_of

pytest.importorskip("torch")

SECTION = re.compile(r"^## (.*?)\n(.*?)^```python\n(.*?)^```\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CASES = {title: parts for title, *parts in SECTION.findall(path_of("which_rank.md").read_text())}
# Tests of the second tier look for the same answers: those of adapters/test_non_finite.py and
# adapters/test_torch_consistency.py, and the cases of JAX's collectives.
TESTED_ELSEWHERE = (
    "The NaN of one rank",
    "Learning rates differ",
    "The optimizer has the parameters of an earlier model",
    "JAX: `psum_scatter` returns wrong values",
)
# Replaces sirtaki's optimizer by DDP.
WITH_DDP = {
    r"import sirtaki\.torch as": "import torch.distributed as",
    r"hvd\.init\(\)": 'hvd.init_process_group("gloo")',
    r"hvd\.rank\(\)": "hvd.get_rank()",
    r"hvd\.broadcast_parameters\(.*": "model = torch.nn.parallel.DistributedDataParallel(model)",
    r"optimizer = hvd\.DistributedOptimizer\(.*": "",
}
SHORT_TIMEOUT = """
import datetime
import torch.distributed.distributed_c10d as c10d
c10d.default_pg_timeout = datetime.timedelta(seconds=3)
"""


def output_of(program: str, folder: Path, *options: str) -> str:
    """Returns what a program prints on two ranks."""
    script = folder / "train.py"
    script.write_text(program.replace("localhost:9876", free_address()))
    command = hvdrun(2, *options, sys.executable, script)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=folder)
    return done.stdout + done.stderr


def missing(quoted: str, library: str, printed: str) -> list[str]:
    """Returns the lines that the page quotes of a library and that were not printed."""
    lines = re.findall(rf"^{library} +\| (.*)$", quoted, re.MULTILINE)
    assert lines
    patterns = {line: ".*".join(map(re.escape, line.split("…"))) for line in lines}
    return [line for line, pattern in patterns.items() if not re.search(pattern, printed)]


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=[pytest.mark.exhaustive] if title in TESTED_ELSEWHERE else [])
        for title in CASES
    ],
)
def test_sirtaki_names_the_rank(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prose, program, quoted = CASES[title]
    for package in re.findall(r"^(?:import|from) (accelerate|jax)", program, re.MULTILINE):
        pytest.importorskip(package)
    timeline = tmp_path / "t.json"
    is_traced = timeline.name in prose
    if is_traced:
        monkeypatch.setenv("SIRTAKI_TIMELINE", str(timeline))
    printed = output_of(program, tmp_path, *([] if "hvd.init()" in program else ["--as-gloo"]))
    if is_traced:
        commands.main(["trace", "report", str(timeline)])
        printed += capsys.readouterr().out
    assert not missing(quoted, "sirtaki", printed), printed


@pytest.mark.exhaustive
@pytest.mark.parametrize("title", CASES)
def test_gloo_does_not(title: str, tmp_path: Path) -> None:
    _, program, quoted = CASES[title]
    if "sirtaki.torch" in program:
        for pattern, replacement in WITH_DDP.items():
            program = re.sub(pattern, replacement, program)
    options = [] if "sirtaki" in program else ["--torch-env"]
    printed = output_of(SHORT_TIMEOUT + program, tmp_path, *options)
    assert not missing(quoted, "gloo", printed), printed
