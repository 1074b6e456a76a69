"""`sirtaki doctor -H …` with a stand-in for ssh: hosts that take part, and hosts that cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import FAILSAFE_SECONDS, Hosts

from sirtaki.runner.doctor.gathering import MARK

OLD = json.dumps({"hello": "0.0.9"})


def examine(environment: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Runs the doctor; returns its exit code and its report."""
    command = [sys.executable, "-m", "sirtaki", "doctor", "--json", "--frameworks", "numpy"]
    done = subprocess.run(
        [*command, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_another_host_sends_its_facts(hosts: Hosts, environment: dict[str, str]) -> None:
    hosts(hostB={"stdout": "Welcome to hostB\n", "environment": {"SIRTAKI_STALL_REPROT": "1"}})
    code, report = examine(environment, "--quick", "-H", "localhost:1,hostB:2")
    assert code == 0, report
    assert set(report["hosts"]) == {"localhost", "hostB"}
    assert report["ranks"] == {"localhost": 1, "hostB": 2}
    assert abs(report["clocks"]["hostB"]["seconds"]) <= report["clocks"]["hostB"]["error"] + 1.0
    found = {one["rule"]: one["hosts"] for one in report["findings"]}
    assert found["variable-unknown"] == ["hostB"]  # the settings of its login
    assert found["host-twice"] == []  # the stand-in is this machine
    assert "link-untried" not in found


def test_the_launching_host_is_examined_although_it_has_no_rank(
    hosts: Hosts, environment: dict[str, str]
) -> None:
    hosts(hostB={})
    _, report = examine(environment, "--quick", "-H", "hostB:2")
    assert report["ranks"] == {"localhost": 0, "hostB": 2}
    assert report["hosts"]["localhost"]["frameworks"] == []
    assert [one["name"] for one in report["hosts"]["hostB"]["frameworks"]] == ["numpy"]


@pytest.mark.parametrize(
    ("behaviour", "rule", "text"),
    [
        (
            {"exit_code": 255, "stderr": "me@hostB: Permission denied (publickey).\n"},
            "login-refused",
            "`ssh-copy-id -p 2222 hostB` puts your key there",
        ),
        (None, "host-unknown", "check the name, or write its address"),
        (
            {"replace": [sys.executable, "/no/such/python"]},
            "python-missing",
            "install Python and sirtaki there",
        ),
        (
            {"replace": ["-m sirtaki ", "-m sirtaki_of_another_time "]},
            "sirtaki-missing",
            "pip install sirtaki==",
        ),
        (
            {"replace": [f"exec {sys.executable}", f"exec echo '{MARK}{OLD}' #"]},
            "versions-differ",
            "install the same version on both",
        ),
    ],
)
def test_a_host_that_cannot_take_part(
    behaviour: dict[str, object] | None,
    rule: str,
    text: str,
    hosts: Hosts,
    environment: dict[str, str],
) -> None:
    hosts(**({} if behaviour is None else {"hostB": behaviour}))
    code, report = examine(environment, "--quick", "-p", "2222", "-H", "localhost:1,hostB:1")
    assert code == 1
    (problem,) = [one for one in report["findings"] if one["level"] == "problem"]
    assert problem["rule"] == rule
    assert text in problem["remedy"]
    assert set(report["failures"]) == {"hostB"}


def test_a_job_on_all_hosts(hosts: Hosts, environment: dict[str, str], tmp_path: Path) -> None:
    hosts(hostB={})
    code, report = examine(environment, "-H", "localhost,hostB:1")
    assert code == 0, report
    assert (report["job"]["ranks"], report["job"]["failure"]) == (2, "")
    # Only a rank that hvdrun starts on hostB has both the host's name and this host's PYTHONPATH.
    is_rank = "os.environ.get('HOSTNAME') == 'hostB' and 'SIRTAKI_RANK' in os.environ"
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\nif {is_rank}: sys.exit('out of order')")
    code, report = examine({**environment, "PYTHONPATH": str(tmp_path)}, "-H", "localhost:1,hostB:1")
    assert code == 1
    (problem,) = [one for one in report["findings"] if one["level"] == "problem"]
    assert problem["rule"] == "job-on-hosts"
    assert "on hostB" in problem["evidence"]


def test_no_ssh_here(environment: dict[str, str], tmp_path: Path) -> None:
    code, report = examine({**environment, "PATH": str(tmp_path)}, "-H", "hostB:1")
    assert code == 1
    assert [one["rule"] for one in report["findings"] if one["level"] == "problem"] == ["no-ssh-client"]
