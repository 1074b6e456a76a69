"""The options about autotune: combinations without a meaning, and logs that a job starts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from sirtaki.runner.cli.options import parse
from sirtaki.runner.launch.errors import LaunchError

HEAD = "step,purpose,hand_over,chunk_bytes,spin,step_seconds,verdict"
LOG = f"{HEAD}\n16,try spin=0,auto,4096,0,0.1,\n99,result,late,262144,0.0002,,kept\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.csv"
    path.write_text(LOG)
    return path


def test_a_log_gives_the_settings_of_its_last_line(log: Path) -> None:
    _, settings = parse(["--autotune-load", str(log), "-np", "2", "true"])
    assert settings == {
        "SIRTAKI_HAND_OVER": "late",
        "SIRTAKI_CHUNK_BYTES": "262144",
        "SIRTAKI_SPIN": "0.0002",
    }


def test_options_override_a_log(log: Path) -> None:
    _, settings = parse(["--autotune-load", str(log), "--spin", "0.1", "--autotune", "-np", "2", "true"])
    assert settings["SIRTAKI_SPIN"] == "0.1"
    assert settings["SIRTAKI_CHUNK_BYTES"] == "262144"
    assert settings["SIRTAKI_AUTOTUNE"] == "1"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "cannot read .*tuning.csv: No such file or directory"),
        ("", "has no result"),
        (f"{HEAD}\n16,try spin=0,auto,4096,0,0.1,\n", "has no result"),
        (LOG.replace("late", "never"), "--hand-over cannot be 'never'"),
        ("\0\n\0", "cannot read|has no result"),
    ],
)
def test_a_log_without_a_result_is_refused(log: Path, text: str | None, what: str) -> None:
    if text is None:
        log.unlink()
    else:
        log.write_text(text)
    with pytest.raises(LaunchError, match=what):
        parse(["--autotune-load", str(log), "-np", "2", "true"])


def test_elastic_jobs_are_not_tuned(log: Path) -> None:
    with pytest.raises(LaunchError, match="--autotune is for jobs whose ranks stay"):
        parse(["--autotune", "--min-np", "1", "-np", "2", "true"])
    assert parse(["--autotune-load", str(log), "--min-np", "1", "-np", "2", "true"])[1]


def test_a_log_needs_autotune() -> None:
    with pytest.raises(LaunchError, match="--autotune-log is for --autotune"):
        parse(["--autotune-log", "a.csv", "-np", "2", "true"])
    _, settings = parse(["--autotune", "--autotune-log-file", "a.csv", "-np", "2", "true"])
    assert settings == {"SIRTAKI_AUTOTUNE": "1", "SIRTAKI_AUTOTUNE_LOG": "a.csv"}
