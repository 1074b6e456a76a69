"""hvdrun --as-horovod: ranks find sirtaki under the name horovod, on every host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import Hosts, Run

SHOW = (
    "import importlib.metadata, importlib.util, os; "
    "print(importlib.metadata.version('horovod'), importlib.util.find_spec('horovod').origin, "
    "*os.environ['PYTHONPATH'].split(os.pathsep)[1:])"
)


def package() -> str:
    import sirtaki.runner

    return str(Path(sirtaki.runner.__file__).parents[1] / "as_horovod" / "packages" / "horovod")


def test_ranks_of_all_hosts_find_it_before_the_rest_of_the_path(
    hvdrun: Run, hosts: Hosts, environment: dict[str, str]
) -> None:
    hosts(hostB={"environment": {"PYTHONPATH": environment.get("PYTHONPATH", "")}})
    path = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), "/elsewhere")))
    result = hvdrun(
        *("-H", "localhost:1,hostB:1", "--as-horovod", "python", "-c", SHOW),
        env={**environment, "PYTHONPATH": path},
    )
    rest = path.replace(os.pathsep, " ")
    expected = [f"[{rank}] 0.28.1 {package()}/__init__.py {rest}" for rank in range(2)]
    assert sorted(result.stdout.splitlines()) == expected, result.stderr


def test_a_program_that_a_rank_starts_finds_it(hvdrun: Run) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import horovod; print(horovod)'])"
    result = hvdrun("-np", "1", "--as-horovod", "python", "-c", code)
    assert result.stdout == f"[0] <module 'horovod' from '{package()}/__init__.py'>\n", result.stderr


@pytest.mark.parametrize("arguments", [(), ("--as-horovod",)])
def test_a_dry_run_shows_the_setting(hvdrun: Run, arguments: tuple[str, ...]) -> None:
    result = hvdrun("-np", "1", *arguments, "--dry-run", "true")
    assert ("setting: SIRTAKI_AS_HOROVOD=1" in result.stdout.splitlines()) == bool(arguments)


def test_workers_of_an_elastic_job_find_it(hvdrun: Run) -> None:
    result = hvdrun("-np", "2", "--min-np", "1", "--as-horovod", "python", "-c", "import horovod.common.util")
    assert result.returncode == 0, result.stderr
