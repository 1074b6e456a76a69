"""Programs of sirtaki import nothing from the current folder, where anybody may have put a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS

from sirtaki.runner.cli.command import code_words, module_words

PLANTED = "open('planted', 'a').write(__name__ + ' ')\nraise SystemExit('planted')\n"
MODULES = ("selectors", "json", "runpy", "socket", "numpy", "sirtaki", "argparse")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with files named like modules; all that follows runs there."""
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FAILSAFE_SECONDS
    )


@pytest.mark.parametrize(
    "words",
    [
        ("doctor", "--frameworks", "torch"),
        ("bench", "allreduce", "-np", "2", "-b", "8", "-e", "8", "--rounds", "1"),
    ],
    ids=["doctor", "bench"],
)
def test_a_tool_runs_none_of_the_files(folder: Path, words: tuple[str, ...]) -> None:
    ended = run(os.path.join(os.path.dirname(sys.executable), "sirtaki"), *words)
    assert not (folder / "planted").exists(), (folder / "planted").read_text()
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("has_safe_path", {sys.version_info >= (3, 11), False})
def test_words_of_a_module_and_of_code(folder: Path, has_safe_path: bool) -> None:
    """Python 3.10 knows no -P."""
    code = run(sys.executable, *code_words("import json, sirtaki; print(json.dumps(1))", has_safe_path))
    assert (code.stdout, code.stderr) == ("1\n", "")
    module = run(sys.executable, *module_words("sirtaki", has_safe_path), "--version")
    assert (module.returncode, module.stderr) == (0, "")
    assert "sirtaki" in module.stdout
    assert not (folder / "planted").exists()


def test_programs_of_the_runner_are_started_in_no_other_way() -> None:
    """`-m` in the words of a command makes Python import from the current folder first."""
    runner = Path(__file__).parents[2] / "runner"
    allowed = {"command.py", "auto_command.py", "api.py"}  # the user's program, and functions of the user
    found = {file.name for file in runner.rglob("*.py") if '"-m"' in file.read_text()}
    assert found <= allowed
