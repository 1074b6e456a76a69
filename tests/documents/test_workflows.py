"""The workflows of .github: their commands are the project's own, and their rights the smallest that work.

`make lint` compares them with the published schema.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
JOBS = {
    f"{name}.{job}": content
    for name, workflow in WORKFLOWS.items()
    for job, content in workflow["jobs"].items()
}
WRITING = {"wheels.publish": {"id-token"}, "docs.publish": {"id-token", "pages"}}
OUTSIDE_OF_CI = {"make docs", "make wheels", 'bash .ci/check_tag "$GITHUB_REF_NAME"'}


def steps(kind: str) -> list[str]:
    """Returns the commands (`run`) or the actions (`uses`) of all jobs."""
    return [step[kind] for job in JOBS.values() for step in job["steps"] if kind in step]


def commands_of_ci() -> set[str]:
    """Returns the stages of .ci/run."""
    text = (ROOT / ".ci" / "run").read_text()
    stages = re.findall(r"^\s*stage ([^|#\n]+)", text, re.MULTILINE)
    (tiers,) = re.findall(r"^for tier in (.+); do$", text, re.MULTILINE)
    return {stage.strip().replace("$tier", tier) for stage in stages for tier in tiers.split()}


def test_commands_are_those_of_continuous_integration() -> None:
    commands = {re.sub(r"^sudo \S+ ", "", command) for command in steps("run")}
    assert commands - commands_of_ci() - OUTSIDE_OF_CI == {"bash .ci/run"}
    assert {"make lint", "make test", *OUTSIDE_OF_CI} < commands


@pytest.mark.parametrize("command", sorted(commands_of_ci() | set(steps("run"))))
def test_each_command_runs_what_exists(command: str) -> None:
    program, *arguments = [word for word in shlex.split(command) if not word.startswith(("-", "sudo"))]
    if program == "bash":
        assert (ROOT / arguments[0]).is_file()
    else:
        assert program == "make"
        known = subprocess.run([program, "--dry-run", *arguments], cwd=ROOT, capture_output=True, check=False)
        assert known.returncode == 0, known.stderr


def test_jobs_may_only_read_except_where_they_publish() -> None:
    assert {str(workflow["permissions"]) for workflow in WORKFLOWS.values()} == {"{'contents': 'read'}"}
    rights = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert {name: set(given) for name, given in rights.items()} == WRITING
    assert all("environment" in JOBS[name] for name in WRITING)


def test_actions_have_a_version_and_jobs_a_limit() -> None:
    assert [action for action in steps("uses") if not re.search(r"@(v\d+|release/v\d+)$", action)] == []
    assert [name for name, job in JOBS.items() if not job["timeout-minutes"] > 0] == []


def check_tag(tag: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", ROOT / ".ci" / "check_tag", tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_tag_names_the_version() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    assert check_tag(f"v{version}").returncode == 0
    for wrong in (version, f"v{version}.1", "v0.0.1"):
        refused = check_tag(wrong)
        assert refused.returncode == 1
        assert f"the tag has to be v{version}" in refused.stdout
