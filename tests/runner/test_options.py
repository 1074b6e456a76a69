"""hvdrun's options: its own, Horovod's, and those of a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_gpu import FOLDER, needs_fake
from launching import Run

from sirtaki.runner.cli.options import REFUSED, config_arguments, parse
from sirtaki.runner.launch.errors import LaunchError

CONFIG = """\
num_proc: 3
hosts: [a:2, b:2]
params:
  fusion_threshold_mb: 32
  cache_capacity: 100
timeline:
  filename: trace.json
  mark_cycles: true
stall_check:
  enabled: true
  warning_time_seconds: 30
autotune:
  enabled: false
logging:
  with_timestamp: false
controller: gloo
report_window: 0.002
verbose: true
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "config.yaml").write_text(text)
        return tmp_path / "config.yaml"

    return write


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_an_option_without_a_meaning_is_refused_with_the_reason(flag: str) -> None:
    for arguments in ([flag, "1"], [f"{flag}=1"], [flag]):
        with pytest.raises(LaunchError) as error:
            parse([*arguments, "-np", "2", "true"])
        assert str(error.value) == f"hvdrun does not take {flag}: {REFUSED[flag]}"


def test_what_is_so_anyway_may_be_asked_for() -> None:
    options, settings = parse(["--gloo", "--no-autotune", "--stall-check", "-np", "2", "true"])
    assert (options.size, options.command, settings) == (2, ["true"], {})


def test_settings_in_horovods_words() -> None:
    horovods = [
        "--fusion-threshold-mb",
        "64",
        "--stall-check-warning-time-seconds",
        "9",
        "--cache-capacity=7",
    ]
    _, settings = parse([*horovods, "-np", "2", "true"])
    assert settings == {
        "SIRTAKI_FUSION_THRESHOLD": "64M",
        "SIRTAKI_STALL_REPORT": "9",
        "SIRTAKI_CACHE_CAPACITY": "7",
    }
    assert parse(["--no-stall-check", "-np", "2", "true"])[1] == {"SIRTAKI_STALL_REPORT": "86400"}
    with pytest.raises(LaunchError, match=r"--fusion-threshold cannot be 'much"):
        parse(["--fusion-threshold-mb", "much", "-np", "2", "true"])


def test_a_setting_that_is_a_switch_takes_no_value(config: Callable[[str], Path]) -> None:
    for arguments in (
        ["--encrypt", "-np", "2"],
        ["--config-file", str(config("num_proc: 2\nencrypt: true"))],
    ):
        options, settings = parse([*arguments, "true"])
        assert (options.size, options.command, settings) == (2, ["true"], {"SIRTAKI_ENCRYPT": "1"})
    assert parse(["--config-file", str(config("encrypt: false")), "-np", "2", "true"])[1] == {}


def test_both_directions_of_a_switch_are_there() -> None:
    assert parse(["--timeline-mark-cycles", "-np", "1", "true"])[0].timeline_mark_cycles
    options, _ = parse(["--timeline-mark-cycles", "--no-timeline-mark-cycles", "-np", "1", "true"])
    assert not options.timeline_mark_cycles


def test_a_config_file_stands_for_options(config: Callable[[str], Path]) -> None:
    options, settings = parse(["--config-file", str(config(CONFIG)), "python", "train.py"])
    assert (options.size, options.hosts, options.verbose) == (3, "a:2,b:2", True)
    assert (options.timeline_filename, options.timeline_mark_cycles) == (Path("trace.json"), True)
    assert options.command == ["python", "train.py"]
    assert settings == {
        "SIRTAKI_FUSION_THRESHOLD": "32M",
        "SIRTAKI_CACHE_CAPACITY": "100",
        "SIRTAKI_STALL_REPORT": "30",
        "SIRTAKI_REPORT_WINDOW": "0.002",
    }


def test_the_command_line_has_the_last_word(config: Callable[[str], Path]) -> None:
    path = str(config("num_proc: 3\nparams:\n  fusion_threshold_mb: 32\n"))
    for arguments in (
        ["-np", "5", "--fusion-threshold", "1M", "--config-file", path],
        ["--config-file", path, "--fusion-threshold-mb", "1", "-np", "5"],
    ):
        options, settings = parse([*arguments, "true"])
        assert (options.size, settings) == (5, {"SIRTAKI_FUSION_THRESHOLD": "1M"})


def test_an_empty_config_file_says_nothing(config: Callable[[str], Path]) -> None:
    assert config_arguments(config("# nothing\n")) == []
    assert config_arguments(config("params: {cache_capacity: null}\nverbose: false\n")) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("params: {colour: red}", "there is no params.colour: params has fusion_threshold_mb, "),
        ("params: 3", "params has to have keys and values below it"),
        ("timeline: {mark_cycles: 3}", "timeline.mark_cycles is true or false, not 3"),
        ("params: {cache_capacity: {a: 1}}", "params.cache_capacity has to be a number or a text"),
        ("controller: pigeon", "controller is one of gloo, mpi, jsrun, not 'pigeon'"),
        ("- a", "has to consist of keys and values"),
        ("a: [", "is not valid YAML"),
        ("'a b': 1", "'a b' is not a setting"),
        ("no_such_option: 1", "--no-such-option=1"),
        ("controller: mpi", "hvdrun does not take --mpi: "),
        ("autotune: {warmup_samples: 3}", "hvdrun does not take --autotune-warmup-samples: "),
        ("autotune: {log_file: a.csv}", "--autotune-log is for --autotune"),
        ("params: {cycle_time_ms: 3}", "hvdrun does not take --cycle-time-ms: there are no cycles"),
    ],
)
def test_mistakes_in_a_config_file_are_explained(config: Callable[[str], Path], text: str, what: str) -> None:
    with pytest.raises(LaunchError) as error:
        parse(["--config-file", str(config(text)), "-np", "2", "true"])
    assert what in str(error.value)


def test_a_config_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot read .*none.yaml: No such file"):
        parse(["--config-file", str(tmp_path / "none.yaml"), "true"])


def test_every_option_on_the_page_about_launching_is_there(hvdrun: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "launching.md").read_text()
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert len(mentioned) > 5
    assert mentioned <= set(re.findall(r"--[a-z][a-z-]+", hvdrun("--help").stdout))


def test_check_build_tells_what_works_here(hvdrun: Run) -> None:
    result = hvdrun("--check-build")
    assert result.returncode == 0, result.stdout
    found = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert found["core"].startswith("works: ")
    assert found["sirtaki.numpy"].startswith("works with numpy ")
    assert {"sirtaki", "Python", "libcuda", "libnccl", "ssh", "mpirun", "srun"} <= found.keys()


@needs_fake
def test_check_build_tells_which_libraries_gpus_would_use(hvdrun: Run) -> None:
    result = hvdrun("--check-build", "--gpu-libraries", f"/nowhere:{FOLDER}")
    assert f"libcuda          works: libcuda 12.8 from {FOLDER}/libcuda.so.1\n" in result.stdout
    assert f"libnccl          works: libnccl 2.28.3 from {FOLDER}/libnccl.so.2\n" in result.stdout


def test_ranks_of_this_host_need_no_ssh(hvdrun: Run, environment: dict[str, str], tmp_path: Path) -> None:
    names = {"-H": "localhost:1,127.0.0.1:1", "--hosts": "localhost:2"}
    for flag, hosts in names.items():
        result = hvdrun(flag, hosts, "/bin/echo", "hello", env={**environment, "PATH": str(tmp_path)})
        assert sorted(result.stdout.splitlines()) == ["[0] hello", "[1] hello"], result.stderr
    result = hvdrun("-H", "localhost", "/bin/echo", "hello", env={**environment, "PATH": str(tmp_path)})
    assert result.returncode == 0, result.stderr  # as many ranks as GPUs, or one rank
    (tmp_path / "hosts").write_text("localhost slots=3 max_slots=4\n")
    result = hvdrun("--hostfile", "hosts", "-np", "2", "echo", "hello", cwd=tmp_path)
    assert sorted(result.stdout.splitlines()) == ["[0] hello", "[1] hello"]
    assert "hvdrun: hosts, line 1: max_slots is ignored" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["-np", "8", "-H", "localhost:4,hostB:2"],
            "8 ranks need 8 slots, but there are 6 (localhost has 4, ",
        ),
        (["-H", "a:1", "--hostfile", "b"], "--hosts and --hostfile both name the hosts: use one of them"),
        (["--hostfile", "/no/such"], "cannot read /no/such: No such file or directory"),
        (["-H", "-oProxyCommand=x:1"], "expected one argument"),
        (["-H=-oProxyCommand=x:1"], "is not a host"),
        (["-p", "0", "-np", "1"], "it takes a number from 1 to 65535, not '0'"),
    ],
)
def test_mistakes_about_hosts_are_explained(hvdrun: Run, arguments: list[str], text: str) -> None:
    result = hvdrun(*arguments, "true")
    assert result.returncode == 2
    assert text in result.stderr


def test_a_dry_run_shows_what_would_run_where(hvdrun: Run, environment: dict[str, str]) -> None:
    command = ["-np", "5", "-H", "localhost:2,hostB:2,[fe80::1]:4", "-p", "2222", "-i", "key", "--dry-run"]
    result = hvdrun(
        *command, "--cache-capacity", "7", "sh", "-c", "x y", env={**environment, "SECRET": "hush"}
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any(line.startswith("command: /") and line.endswith("sh -c 'x y'") for line in lines)
    assert "setting: SIRTAKI_CACHE_CAPACITY=7" in lines
    assert {"localhost: ranks 0 to 1", "hostB: ranks 2 to 3", "fe80::1: rank 4"} <= set(lines)
    ssh = lines[lines.index("hostB: ranks 2 to 3") + 1]
    assert ssh.startswith("  ssh -T -oBatchMode=yes ")
    assert " -p 2222 -i " in ssh
    assert "-- hostB 'exec " in ssh
    assert "hush" not in result.stdout
