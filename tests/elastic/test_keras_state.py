"""Runs the tests of `keras_state.py` on torch: this process may have imported Keras on another backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE

pytest.importorskip("torch")
pytest.importorskip("keras")
TESTS = Path(__file__).with_name("keras_state.py")


def test_the_state_of_keras() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    done = subprocess.run(
        command,
        env={**os.environ, "KERAS_BACKEND": "torch"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
