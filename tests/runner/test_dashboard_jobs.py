"""`hvdrun --dashboard` with jobs that run: its address, its processes, and what is refused."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from dashboards import KINDS, address_in, cookie_of, events_of, request, start_summing
from launching import Hosts, Run, Start, wait_until

from sirtaki.runner.cli.options import parse
from sirtaki.runner.launch.errors import LaunchError

SERVERS = [("--dashboard", "dashboard"), ("--metrics-port=0", "metrics")]


def texts_of(job: psutil.Process) -> Iterator[str]:
    """Yields what others may read of a job's processes: command lines and environments."""
    for process in (job, *job.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            yield from process.cmdline()
            yield from process.environ().values()


@pytest.mark.parametrize("kind", ["fixed", "elastic", "elsewhere"])
def test_a_page_shows_the_ranks_of_a_job_until_it_ends(
    start_hvdrun: Start, hosts: Hosts, tmp_path: Path, kind: str
) -> None:
    hosts(hostB={})
    job, errors = start_summing(start_hvdrun, tmp_path, "-np", "2", *KINDS[kind], "--dashboard", kind=kind)
    port, token = address_in(errors)
    assert not any(token in text for text in texts_of(psutil.Process(job.pid)))
    cookie = cookie_of(request(port, f"/?token={token}"))
    assert request(port, f"/?token={token}").status == 403
    events = events_of(request(port, "/events", Cookie=cookie))
    looks = (look for kind, look in events if kind == "look")
    look = next(look for look in looks if look["ranks_up"] == 2 and look["operations"] != "0")
    assert [row["rank"] for row in look["rows"]] == [0, 1]
    assert (look["size"], look["ranks_away"]) == (2, 0)
    (tmp_path / "end").touch()
    assert [kind for kind, _ in events][-1] == "end"
    assert job.wait() == 0, errors.read_text()


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
@pytest.mark.parametrize(("option", "module"), SERVERS)
def test_the_end_of_a_server_is_told_while_the_job_goes_on(
    start_hvdrun: Start, tmp_path: Path, kind: str, option: str, module: str
) -> None:
    options = ("--min-np", "1") if kind == "elastic" else ()
    job, errors = start_summing(start_hvdrun, tmp_path, "-np", "1", *options, option, kind=kind)
    (server,) = servers_of(job, f"sirtaki.runner.{module}.server")
    server.kill()
    notice = f"(pid {server.pid}) was killed by signal 9 (SIGKILL): the job goes on without it"
    wait_until(lambda: notice in errors.read_text(), "hvdrun tells the end of the server")
    (tmp_path / "end").touch()
    assert job.wait() == 0, errors.read_text()
    assert errors.read_text().count("the process that serves the ") == 1


def servers_of(job: subprocess.Popen[bytes], module: str) -> list[psutil.Process]:
    """Waits until a job has a process that runs a module; returns its processes that do."""
    found: list[psutil.Process] = []

    def has_started() -> bool:
        assert job.poll() is None
        for process in psutil.Process(job.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                if module in process.cmdline():
                    found.append(process)
        return bool(found)

    wait_until(has_started, f"{module} runs")
    return found


def test_a_server_that_ends_with_the_job_is_no_news(hvdrun: Run) -> None:
    result = hvdrun("-np", "1", "--dashboard", "--metrics-port", "0", "echo", "started")
    assert result.returncode == 0, result.stderr
    assert "the process that serves" not in result.stderr


def test_a_port_in_use_is_an_error_before_ranks_start(hvdrun: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = hvdrun("-np", "2", f"--dashboard={port}", "echo", "started")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"--dashboard: cannot listen at port {port} of 127.0.0.1 on " in result.stderr


def test_a_page_that_others_reach_comes_with_a_warning(hvdrun: Run) -> None:
    result = hvdrun("-np", "1", "--dashboard", "0.0.0.0:0", "echo", "started")
    assert result.returncode == 0, result.stderr
    pattern = rf"http://{re.escape(socket.gethostname())}:\d+/\?token=\S+ \(not encrypted: others"
    assert re.search(pattern, result.stderr)


def test_a_dry_run_names_the_page(hvdrun: Run) -> None:
    result = hvdrun("-np", "1", "--dashboard", "8080", "--dry-run", "echo")
    assert "this host serves a page with all ranks at 8080 (--dashboard)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "address", "command"),
    [
        (["--dashboard", "python", "-c", "1"], "0", ["python", "-c", "1"]),
        (["--dashboard", "--verbose", "x"], "0", ["x"]),
        (["--dashboard", "8080", "x"], "8080", ["x"]),
        (["--dashboard=8080", "x", "--dashboard"], "8080", ["x", "--dashboard"]),
        (["--fusion-threshold", "1", "--dashboard", "x"], "0", ["x"]),
        (["--dashboard", "[::1]:0", "x"], "[::1]:0", ["x"]),
        (["x", "--dashboard", "y"], None, ["x", "--dashboard", "y"]),
    ],
)
def test_the_address_may_be_left_out(arguments: list[str], address: str | None, command: list[str]) -> None:
    options, _ = parse(["-np", "2", *arguments])
    assert (options.dashboard, options.command) == (address, command)


def test_a_wrong_port_is_not_taken_for_the_command() -> None:
    with pytest.raises(LaunchError, match="it takes a port from 0 to 65535, or HOST:PORT, not '70000'"):
        parse(["-np", "2", "--dashboard", "70000", "python"])


@pytest.mark.parametrize(("value", "address"), [("true", "0"), ("8080", "8080")])
def test_the_page_may_be_asked_for_in_a_file_of_options(tmp_path: Path, value: str, address: str) -> None:
    (tmp_path / "options.yaml").write_text(f"dashboard: {value}\n")
    options, _ = parse(["-np", "2", "--config-file", str(tmp_path / "options.yaml"), "python"])
    assert (options.dashboard, options.command) == (address, ["python"])


def test_hvdrun_without_the_option_imports_nothing_of_it() -> None:
    program = (
        "import sys; import sirtaki.runner.launch.job; from sirtaki.runner.cli.options import parse; "
        "parse(['-np', '2', 'python']); "
        "print([name for name in sys.modules if 'dashboard' in name or name.startswith('http')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
