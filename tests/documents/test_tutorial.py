"""The four steps of the tutorial: their scripts run, and their commands print what the page quotes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from process_world import PATIENCE

from .pages import path_of

pytest.importorskip("torch")

BLOCK = re.compile(r"^```(python|diff|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Numbers that differ from run to run.
CHANGING = re.compile(r"(?<=pid )\d+|(?<=process )\d+|(?<=loss )[\d.]+|(?<=epoch )\d\d|(?<=commit )\d+")
RANK_1 = re.compile(r"rank 1 of 2 is process (\d+)")


def changed(script: str, difference: str) -> str:
    """Returns a script after a reader's changes, each a paragraph of the difference."""
    for paragraph in difference.rstrip("\n").split("\n\n"):
        lines = paragraph.split("\n")
        before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
        assert script.count(f"\n{before}\n") + script.startswith(before) == 1, before
        script = script.replace(before, after)
    return script


def run(command: str, folder: Path) -> str:
    """Returns what a shell's command prints. Kills rank 1 of an elastic job in its third epoch."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        ["sh", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},  # other tests run beside
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    limit = threading.Timer(PATIENCE, os.killpg, (process.pid, signal.SIGTERM))
    limit.start()
    printed = ""
    for line in process.stdout:
        printed += line
        if "--min-np" in command and "epoch 2:" in line:
            (rank_1,) = RANK_1.findall(printed)
            os.kill(int(rank_1), signal.SIGKILL)
    limit.cancel()
    assert process.wait(PATIENCE) == 0, printed
    return printed


def is_quoted(text: str, printed: str) -> bool:
    """Returns whether all lines that the page quotes are printed; the ranks' lines may come in any order."""
    quoted = [CHANGING.sub("…", line) for line in text.splitlines() if line != "…"]
    assert quoted
    patterns = ("".join([r"^", r".*".join(map(re.escape, line.split("…"))), r"$"]) for line in quoted)
    return all(re.search(pattern, printed, re.MULTILINE) for pattern in patterns)


def test_each_step_runs_and_prints_what_the_page_quotes(tmp_path: Path) -> None:
    blocks = BLOCK.findall(path_of("tutorial.md").read_text())
    script = printed = ""
    for kind, text in blocks:
        if kind == "text":
            assert is_quoted(text, printed), printed
        elif kind == "sh":
            (tmp_path / "train.py").write_text(script)
            printed = run(text, tmp_path)
        else:
            script = text if kind == "python" else changed(script, text)
    assert [kind for kind, _ in blocks].count("text") == 4
    assert float(re.findall(r"loss ([\d.]+)", printed)[-1]) < 0.2
