"""The key of a running job is in one file that only its owner may read, and nowhere else."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from key_search import SCRIPT, processes, secrets_in
from launching import FAILSAFE_SECONDS, HVDRUN, wait_until


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a job with all its output enabled, whose two ranks have found each other."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "temporary").mkdir()
    told = (
        "--verbose",
        "--timeline-filename",
        tmp_path / "timeline",
        "--output-filename",
        tmp_path / "output",
    )
    options = (*told, "--dump-directory", tmp_path / "dumps", "--stall-report-file", tmp_path / "stalls")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIRTAKI_")}
    with (tmp_path / "log").open("wb") as log:
        hvdrun = subprocess.Popen(
            [*HVDRUN, *options, "-np", "2", "python", tmp_path / "script.py", tmp_path],
            env={**environment, "TMPDIR": str(tmp_path / "temporary")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        ready = [tmp_path / f"ready{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in ready), "both ranks are ready")
        yield hvdrun
    finally:
        hvdrun.terminate()
        hvdrun.wait(FAILSAFE_SECONDS)


def test_the_key_is_in_its_file_only(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    file = Path((tmp_path / "ready0").read_text())
    assert file.parent.parent == tmp_path / "temporary"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    key = bytes.fromhex(file.read_text())
    looked_at = dict(processes())
    assert Path(f"/proc/{job.pid}/cmdline") in looked_at
    assert sum(b"script.py" in line for path, line in looked_at.items() if path.name == "cmdline") >= 3
    assert not [path for path, data in looked_at.items() if secrets_in(data, key)]
    (tmp_path / "go").touch()
    assert job.wait(FAILSAFE_SECONDS) == 1
    assert not list((tmp_path / "temporary").iterdir())
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"timeline", "log", "rank0.json", "stderr"} <= {path.name for path in written}
    assert b"ValueError: enough" in written[tmp_path / "log"]
    assert not [path for path, data in written.items() if secrets_in(data, key)]


def test_the_search_finds_a_key() -> None:
    key = os.urandom(32)
    for data in (key, key.hex().encode(), key.hex().upper().encode()):
        assert secrets_in(b"before" + data + b"after", key)
    assert not secrets_in(b"nothing", key)
    with subprocess.Popen(["sleep", "300"], env={"KEY": key.hex()}) as child:
        try:
            found = [path for path, data in processes() if secrets_in(data, key)]
        finally:
            child.kill()
    assert found == [Path(f"/proc/{child.pid}/environ")]
