"""`sirtaki doctor` as a user starts it, on this host, with faults that can be made here."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import FOLDER, needs_fake
from launching import FAILSAFE_SECONDS, read_terminal

from sirtaki.runner.cli import commands
from sirtaki.runner.cli.command import terminal_status
from sirtaki.runner.doctor import cli
from sirtaki.runner.doctor.facts import FRAMEWORKS
from sirtaki.runner.doctor.findings import Picture
from sirtaki.runner.doctor.gathering import Trial
from sirtaki.runner.launch.errors import LaunchError

Doctor = Callable[..., subprocess.CompletedProcess[str]]
QUICK = ("--quick", "--frameworks", "numpy")


@pytest.fixture
def doctor(sirtaki: Doctor) -> Doctor:
    """Returns a function that runs the doctor, with more variables, and returns its output."""
    return functools.partial(sirtaki, "doctor")


def levels(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Returns the rules that have found something, and their levels, from the lines of the output."""
    lines = [line for line in done.stdout.splitlines() if line.endswith("]") and not line.startswith(" ")]
    return {line.rpartition("[")[2].rstrip("]"): line.partition(":")[0] for line in lines}


def with_module(folder: Path, name: str, text: str) -> str:
    """Returns a PYTHONPATH on which a module comes before the installed one."""
    (folder / f"{name}.py").write_text(text)
    return str(folder)


def test_a_framework_is_tried_by_a_job(doctor: Doctor) -> None:
    done = doctor("-np", "2", "--frameworks", "numpy", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["schema"], report["exit_code"], report["ranks"]) == (1, 0, {"localhost": 2})
    facts = report["hosts"]["localhost"]
    assert [(one["name"], one["state"]) for one in facts["frameworks"]] == [("numpy", "works")]
    assert not facts["missed"].keys() & {"installation", "frameworks", "cores", "memory"}
    assert not facts["installation"]["broken"]
    assert facts["cores"]["usable"] >= 1
    assert facts["memory"]["available"] > 0
    assert {"rule": "threads-unset", "level": "note", "hosts": ["localhost"]}.items() <= next(
        one.items() for one in report["findings"] if one["rule"] == "threads-unset"
    )


def test_no_framework_is_imported_without_a_request(doctor: Doctor, tmp_path: Path) -> None:
    for name in FRAMEWORKS:
        package, metadata = tmp_path / name, tmp_path / f"{name}-7.8.9.dist-info"
        package.mkdir()
        (package / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')")
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.8.9\n")
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "imported").exists()
    for name in FRAMEWORKS:
        assert re.search(rf"^  {name} +7\.8\.9 is installed", done.stdout, re.MULTILINE)
    assert "\nnot tried: numpy, torch, tensorflow, keras, jax: `sirtaki doctor -np 2` runs" in done.stdout
    done = doctor("--quick", "--frameworks", "keras", PYTHONPATH=str(tmp_path))
    assert "keras" in (tmp_path / "imported").read_text()
    assert "not tried" not in done.stdout


@pytest.mark.parametrize("requests", [["-np", "2"], ["-H", "localhost:2"], ["--frameworks", "jax"]])
def test_an_option_asks_for_jobs(requests: list[str]) -> None:
    assert cli._choice(cli._parser().parse_args(requests)).trial is Trial.JOB
    assert cli._choice(cli._parser().parse_args([*requests, "--quick"])).trial is Trial.IMPORT
    assert cli._choice(cli._parser().parse_args([])).trial is Trial.NONE


def test_a_pipe_gets_plain_text_and_a_terminal_colours(environment: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sirtaki", "doctor", *QUICK]
    environment |= {"TERM": "xterm", "SIRTAKI_STALL_REPROT": "1"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    with subprocess.Popen(command, env=environment, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        shown = read_terminal(ours)
    os.close(ours)
    piped = subprocess.run(command, env=environment, capture_output=True, timeout=FAILSAFE_SECONDS)
    assert b"\x1b[" in shown
    assert b"\x1b[" not in piped.stdout
    assert piped.stderr == b""
    assert b"warning: localhost: a variable has no effect" in piped.stdout
    assert process.returncode == piped.returncode == 0


def test_a_low_limit_of_open_files(doctor: Doctor) -> None:
    done = doctor("-np", "2", *QUICK, prefix=("sh", "-c", 'ulimit -n 100; exec "$@"', "sh"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert levels(done)["descriptors"] == "warning"
    assert "(`ulimit -n` is 100, and 2 ranks may need 144): run `ulimit -n 144` before hvdrun" in done.stdout


def test_variables_that_are_wrong(doctor: Doctor) -> None:
    done = doctor("--frameworks", "numpy", SIRTAKI_CACHE_CAPACITY="many", SIRTAKI_STALL_REPROT="1")
    assert done.returncode == 1
    found = levels(done)
    assert (found["variable-invalid"], found["variable-unknown"]) == ("problem", "warning")
    assert "did you mean SIRTAKI_STALL_REPORT?" in done.stdout
    assert "framework-job" not in found  # it would only repeat the same


def test_no_key_is_shown(doctor: Doctor, tmp_path: Path) -> None:
    key, other = "ab" * 32, "cd" * 32
    file = tmp_path / "key"
    file.write_text(key)
    file.chmod(0o644)
    variables = {"SIRTAKI_KEY_FILE": str(file), "SIRTAKI_KEY": other, "NCCL_SECRET": "hush"}
    report = tmp_path / "report.txt"
    done = doctor(*QUICK, "--report", str(report), **variables)
    assert done.returncode == 1
    found = levels(done)
    assert (found["key-file"], found["key-in-environment"]) == ("problem", "warning")
    assert report.stat().st_mode & 0o777 == 0o600
    written = report.read_text()
    assert f"  SIRTAKI_KEY_FILE={file}\n" in written
    assert "  SIRTAKI_KEY=<removed>\n" in written
    shown = done.stdout + written + doctor(*QUICK, "--json", **variables).stdout
    assert not [secret for secret in (key, other, "hush") if secret in shown]


def test_a_framework_that_cannot_be_imported(doctor: Doctor, tmp_path: Path) -> None:
    path = with_module(tmp_path, "keras", "raise ImportError('no backend \\x1b[31m here')")
    done = doctor("--frameworks", "keras", PYTHONPATH=path)
    assert done.returncode == 1
    assert levels(done)["framework-import"] == "problem"
    assert "ImportError: no backend ?[31m here" in done.stdout


def test_a_framework_whose_job_fails(doctor: Doctor, tmp_path: Path) -> None:
    broken = (
        "import sys\n"
        "if any('sirtaki.runner.doctor.all_reduce' in word for word in sys.orig_argv[1:4]):\n"
        "    sys.exit('out of order')"
    )
    done = doctor("--frameworks", "numpy", PYTHONPATH=with_module(tmp_path, "sitecustomize", broken))
    assert done.returncode == 1
    assert levels(done)["framework-job"] == "problem"
    assert "failed with exit code 1" in done.stdout


def test_a_core_that_cannot_be_opened(doctor: Doctor, tmp_path: Path) -> None:
    path = with_module(tmp_path, "_cffi_backend", "raise ImportError('another ABI')")
    done = doctor(PYTHONPATH=path)
    assert done.returncode == 1
    found = levels(done)
    assert found["core-broken"] == "problem"
    assert not {"framework-import", "framework-job", "topic-missed"} & found.keys(), done.stdout


@needs_fake
def test_the_libraries_of_gpus_and_their_symbols(doctor: Doctor) -> None:
    done = doctor("--json", *QUICK, SIRTAKI_GPU_LIBRARIES=str(FOLDER))
    gpu = json.loads(done.stdout)["hosts"]["localhost"]["gpu"]
    assert gpu["nccl"] == {
        "works": True,
        "path": f"{FOLDER}/libnccl.so.2",
        "text": f"libnccl 2.28.3 from {FOLDER}/libnccl.so.2",
    }
    assert gpu["cuda"]["works"]
    assert (gpu["symbols"], gpu["missing"]) == ([], ["ncclCommShrink", "ncclCommRevoke", "ncclCommGrow"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["doctor", "--frameworks", "caffe"], "sirtaki doctor: there is no framework 'caffe'"),
        (["doctor", "--jsno"], "did you mean --json?"),
        (["doctor", "-H", "a:1", "--hostfile", "b"], "--hosts and --hostfile both name the hosts"),
        (["doctor", "-np", "3", "-H", "localhost:1"], "3 ranks need 3 slots"),
        (["doctor", "-H", "hostB:1", "--launcher", "srun"], "--launcher srun"),
        (["doctor", *QUICK, "--report", "/no/such/file"], "cannot write /no/such/file"),
        (["dcotor"], "sirtaki: there is no command 'dcotor'"),
    ],
)
def test_what_cannot_run_exits_with_2(arguments: list[str], text: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "sirtaki", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FAILSAFE_SECONDS)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_follows_no_link_and_is_private(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    picture = Picture({}, {})
    with pytest.raises(LaunchError, match="cannot write"):
        cli._write_report(tmp_path / "link", picture, [])
    assert not (tmp_path / "target").exists()
    (tmp_path / "old").write_text("x" * 10_000)
    (tmp_path / "old").chmod(0o644)
    cli._write_report(tmp_path / "old", picture, [])
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o600
    assert "nothing was found" in (tmp_path / "old").read_text()


def test_the_page_names_options_that_exist(doctor: Doctor) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations" / "doctor.md").read_text()
    named = set(re.findall(r"(?<=`)--?[a-zA-Z][a-z-]*|(?<= )--[a-z][a-z-]+", page))
    of_others = {"--ntasks-per-node", "--facts"}
    assert len(named) > 5
    assert named - of_others <= set(re.findall(r"--?[a-zA-Z][a-z-]*", doctor("--help").stdout))


def test_an_error_of_the_doctor_itself_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sirtaki.runner.doctor.cli.examine", lambda *_: 1 // 0)
    assert commands.main(["doctor"]) == commands.CANNOT_RUN
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_progress_shows_text_of_another_host_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with terminal_status("looking") as note:
        note("looking at hostB: [/x] [link=http://c]cores[/link]")
    assert "looking at hostB: [/x] [link=http://c]cores[/link]" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "sirtaki", "doctor", *QUICK]
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(command, env=environment, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        assert process.communicate(timeout=FAILSAFE_SECONDS)[1] == b""
    assert process.returncode == commands.CANNOT_RUN


def test_the_program_and_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = importlib.metadata.entry_points(group="console_scripts", name="sirtaki")
    assert program.load() is commands.main
    assert commands.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in commands.COMMANDS.items():
        assert callable(importlib.import_module(command.module).main)
        assert f"  {name:<10} {command.help}" in shown
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sirtaki ")
