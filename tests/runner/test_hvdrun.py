"""hvdrun starts ranks, passes them their places, and reports errors in a command line clearly."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, HVDRUN, Run, Script

from sirtaki.bindings._version import VERSION

SHOW_PLACE = """
names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
for prefix in ("SIRTAKI", "HOROVOD"):
    print(prefix, *[os.environ[f"{prefix}_{name}"] for name in names])
print(os.environ["PYTHONUNBUFFERED"], os.environ["SIRTAKI_START_TIMEOUT"])
"""


def test_each_rank_finds_its_place_in_its_environment(hvdrun: Run, rank_script: Script) -> None:
    result = hvdrun("-np", "3", "--start-timeout", "7", "python", rank_script(SHOW_PLACE))
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        lines = [line for line in result.stdout.splitlines() if line.startswith(f"[{rank}]")]
        place = f"{rank} 3 {rank} 3 0 1"
        assert lines == [f"[{rank}] SIRTAKI {place}", f"[{rank}] HOROVOD {place}", f"[{rank}] 1 7"]


@pytest.mark.parametrize("flag", ["-np", "-n", "--num-proc"])
def test_the_number_of_ranks(hvdrun: Run, flag: str) -> None:
    assert sorted(hvdrun(flag, "2", "echo", "hello").stdout.splitlines()) == ["[0] hello", "[1] hello"]


def test_options_of_the_command_are_its_own(hvdrun: Run) -> None:
    result = hvdrun("-np", "1", "echo", "--verbose", "-np", "3", "--", "x")
    assert result.stdout == "[0] --verbose -np 3 -- x\n"


def test_a_command_that_never_calls_init_is_fine(hvdrun: Run) -> None:
    result = hvdrun("-np", "2", "true")
    assert (result.returncode, result.stdout) == (0, "")


def test_threads_are_shared_and_that_is_said_in_one_line(hvdrun: Run) -> None:
    cores = len(os.sched_getaffinity(0))
    result = hvdrun("-np", str(2 * cores), "sh", "-c", "echo $OMP_NUM_THREADS $MKL_NUM_THREADS")
    assert {line.split("] ")[1] for line in result.stdout.splitlines()} == {"1 1"}
    threads, notice = result.stderr.splitlines()
    assert f"{2 * cores} ranks on " in threads
    assert "OMP_NUM_THREADS=1 for each" in threads
    assert notice.endswith("separate runs, which exchanged nothing")


def test_threads_that_the_user_has_set_stand(hvdrun: Run, environment: dict[str, str]) -> None:
    command = ("sh", "-c", "echo $OMP_NUM_THREADS $MKL_NUM_THREADS")
    result = hvdrun("-np", "1", *command, env={**environment, "OMP_NUM_THREADS": "5"})
    assert (result.stdout, result.stderr) == ("[0] 5\n", "")


def test_python_is_the_one_that_hvdrun_belongs_to(
    hvdrun: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    show = "import sys; print(sys.prefix)"
    empty = {**environment, "PATH": str(tmp_path)}
    result = hvdrun("-np", "1", "python", "-c", show, env=empty)
    assert result.stdout == f"[0] {sys.prefix}\n"
    assert "python" not in result.stderr
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho the other one\n")
    other.chmod(0o755)
    result = hvdrun("-np", "1", "python", "-c", show, env=empty)
    assert result.stdout == f"[0] {sys.prefix}\n"
    assert f"where hvdrun is installed, and not {other}, which comes first on the PATH" in result.stderr
    result = hvdrun("-np", "1", str(other), env=empty)
    assert result.stdout == "[0] the other one\n"
    result = hvdrun("-np", "1", "python", "-c", show, env={**environment, "VIRTUAL_ENV": str(tmp_path)})
    assert result.stdout == f"[0] {sys.prefix}\n"
    assert f"where hvdrun is installed, and not the environment {tmp_path}" in result.stderr


def test_every_rank_reads_nothing_and_lost_input_is_mentioned(hvdrun: Run, tmp_path: Path) -> None:
    assert "standard input" not in hvdrun("-np", "1", "cat").stderr
    given = tmp_path / "given"
    given.write_text("data\n")
    with given.open() as file:
        result = hvdrun("-np", "2", "cat", stdin=file)
    assert (result.returncode, result.stdout) == (0, "")
    assert "hvdrun: standard input is not passed on: every rank reads /dev/null\n" in result.stderr
    reading, writing = os.pipe()
    os.write(writing, b"data")
    assert "standard input is not passed on" in hvdrun("-np", "1", "cat", stdin=reading).stderr
    os.close(reading)
    os.close(writing)


def test_closed_standard_streams_do_not_matter(hvdrun: Run, environment: dict[str, str]) -> None:
    command = f"exec {sys.executable} -m sirtaki.runner -np 2 echo hello <&- >&- 2>&-"
    result = subprocess.run(["sh", "-c", command], env=environment, timeout=FAILSAFE_SECONDS, check=False)
    assert result.returncode == 0


def test_help_and_version(hvdrun: Run) -> None:
    assert hvdrun("--version").stdout == f"hvdrun (sirtaki) {VERSION}\n"
    result = hvdrun("--help")
    assert result.returncode == 0
    for flag in ("-np", "--output-filename", "--start-timeout", "--verbose", "--version"):
        assert flag in result.stdout


def test_verbose_tells_what_happens(hvdrun: Run, rank_script: Script) -> None:
    stderr = hvdrun("-np", "2", "--verbose", "python", rank_script("init()")).stderr
    assert "hvdrun: rank 1 is pid " in stderr
    assert "hvdrun: the rendezvous reports that rank 0 has initialised" in stderr
    assert "hvdrun: rank 0 has ended with exit code 0" in stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (
            ["-np", "2", "pyton", "train.py"],
            127,
            "hvdrun: there is no command 'pyton' on the PATH. Did you mean",
        ),
        (["-np", "2", "./pyton"], 127, "hvdrun: there is no file './pyton'"),
        (["-np", "2", "train.py", "--lr", "1"], 126, "run `hvdrun -np 2 python train.py --lr 1`"),
        (["-np", "2", "./train.py"], 126, "run `hvdrun -np 2 python ./train.py`"),
        (
            ["-np", "2", "./data.txt"],
            126,
            "'./data.txt' is not executable: run `chmod +x ./data.txt`",
        ),
        (
            ["-np", "2", "program"],
            126,
            "'program' is not on the PATH: for the file in this folder write './program'",
        ),
        (["-np", "2", "./broken"], 126, "./broken is neither a program nor a script that begins with '#!'"),
        (["-np", "2", "./astray"], 126, "cannot start rank 0: ./astray: No such file or directory"),
        (["-np", "2", "."], 126, "'.' is a folder, not a program"),
        (["-np", "0", "true"], 2, "whole number of at least 1, not '0'"),
        (["-np", "-1", "true"], 2, "-np"),
        (["-np", "two", "true"], 2, "whole number of at least 1, not 'two'"),
        (["-np"], 2, "-np"),
        (["-np", "2"], 2, "there is no command to run: add one, for example: hvdrun -np 2 python train.py"),
        (["true"], 2, "the number of ranks is missing: give it with -np"),
        ([], 2, "there is no command to run"),
        (["-np", "2", "--start-timeout", "0", "true"], 2, "a number of seconds above 0, not '0'"),
        (["-np", "2", "--start-timeout", "soon", "true"], 2, "a number of seconds above 0, not 'soon'"),
        (["-np", "2", "--no-such-option", "true"], 2, "--no-such-option"),
        (
            ["-np", "2", "--output-filename", "data.txt", "true"],
            2,
            "cannot keep the output of rank 0 in data.txt",
        ),
    ],
)
def test_mistakes_are_explained(
    hvdrun: Run, tmp_path: Path, arguments: list[str], exit_code: int, text: str
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "data.txt").touch()
    for name, content in {"program": "#!/bin/sh\n", "broken": "\0\0\0\0", "astray": "#!/no/such\n"}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    result = hvdrun(*arguments, cwd=tmp_path)
    assert text in result.stderr
    assert result.returncode == exit_code
    assert "Traceback" not in result.stderr


def test_a_rank_cannot_start_ranks(hvdrun: Run) -> None:
    result = hvdrun("-np", "1", sys.executable, "-m", "sirtaki.runner", "-np", "2", "true")
    assert result.returncode == 2
    assert "[0] hvdrun: this is rank 0 of a job that hvdrun has already started" in result.stderr


def test_the_key_is_kept_well_and_removed(hvdrun: Run, rank_script: Script) -> None:
    script = rank_script(
        "path = os.environ['SIRTAKI_KEY_FILE']\n"
        "for p in (path, os.path.dirname(path)): print(oct(os.stat(p).st_mode & 0o777))\n"
        "print(path)\n"
        "key = open(path).read().strip()\n"
        "print(any(key in value for value in os.environ.values()))"
    )
    lines = [line.removeprefix("[0] ") for line in hvdrun("-np", "1", "python", script).stdout.splitlines()]
    assert lines[:2] == ["0o600", "0o700"]
    assert lines[3] == "False"
    assert not Path(lines[2]).parent.exists()


def test_settings_of_the_core_are_options(hvdrun: Run) -> None:
    command = ("sh", "-c", "echo $SIRTAKI_FUSION_THRESHOLD $SIRTAKI_TRANSPORT")
    result = hvdrun("--fusion-threshold", "8M", "-np", "1", "--transport=socket", *command)
    assert result.stdout == "[0] 8M socket\n"
    text = hvdrun("--help").stdout
    assert "--fusion-threshold BYTES" in text
    assert "--transport auto|shm|socket|mpi" in text
    assert "--encrypt encrypt connections between hosts with TLS 1.3" in " ".join(text.split())


@pytest.mark.parametrize(("flag", "value"), [("--transport", "pigeon"), ("--fusion-threshold", "much")])
def test_bad_settings_of_the_core_are_refused_before_anything_starts(
    hvdrun: Run, flag: str, value: str
) -> None:
    result = hvdrun("-np", "2", flag, value, "echo", "started")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"hvdrun: {flag} cannot be '{value}': it takes ")


def test_bad_settings_in_the_environment_are_refused_before_anything_starts(
    hvdrun: Run, environment: dict[str, str]
) -> None:
    for name in ("SIRTAKI_STALL_REPORT", "HOROVOD_STALL_CHECK_TIME_SECONDS"):
        result = hvdrun("-np", "2", "echo", "started", env={**environment, name: "abc"})
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == f"hvdrun: {name} cannot be 'abc': it takes a number (seconds)\n"


def test_misspelt_variables_and_options_are_named_with_the_nearest(
    hvdrun: Run, environment: dict[str, str]
) -> None:
    of_a_service = {"SIRTAKI_SERVICE_HOST": "10.0.0.1", "SIRTAKI_PORT_80_TCP": "tcp://10.0.0.1:80"}
    result = hvdrun(
        "-np", "2", "true", env={**environment, **of_a_service, "SIRTAKI_STALL_REPROT": "3", "SIRTAKI_X": "1"}
    )
    assert result.returncode == 0
    said = [line for line in result.stderr.splitlines() if "SIRTAKI" in line]
    ignored, hint = "means nothing to sirtaki and is ignored", ": did you mean SIRTAKI_STALL_REPORT?"
    assert said == [
        f"hvdrun: the environment variable SIRTAKI_STALL_REPROT {ignored}{hint}",
        f"hvdrun: the environment variable SIRTAKI_X {ignored}",
    ]
    result = hvdrun("-np", "2", "--stall-reprot", "3", "true")
    assert (result.returncode, result.stdout) == (2, "")
    assert "there is no option --stall-reprot: did you mean --stall-report?" in result.stderr


def test_a_misspelt_variable_that_a_script_sets_is_named_by_init(
    hvdrun: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os; os.environ['SIRTAKI_STALL_REPROT'] = '3'\nimport sirtaki.numpy as hvd; hvd.init()"
    )
    result = hvdrun("-np", "2", "python", str(script), env={**environment, "SIRTAKI_X": "1"})
    assert result.returncode == 0
    said = [line for line in result.stderr.splitlines() if "means nothing" in line]
    assert len(said) == 2, said
    assert said[0].startswith("hvdrun: the environment variable SIRTAKI_X ")
    assert said[1].endswith(
        "sirtaki: the environment variable SIRTAKI_STALL_REPROT means nothing to sirtaki and is ignored: "
        "did you mean SIRTAKI_STALL_REPORT?"
    )


def test_separate_runs_of_a_script_are_told_from_a_job(hvdrun: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('done')")
    result = hvdrun("-np", "2", "python", str(script))
    assert result.returncode == 0
    notice = (
        "hvdrun: no rank called hvd.init(): these were 2 separate runs, which exchanged nothing. To train"
    )
    assert result.stderr.splitlines()[-1].startswith(notice)
    notice = hvdrun("-np", "2", "--torch-env", "python", str(script)).stderr.splitlines()[-1]
    assert "or torch.distributed exchanged tensors by another backend" in notice
    script.write_text("import sirtaki.numpy as hvd; hvd.init()")
    assert "no rank called" not in hvdrun("-np", "2", "python", str(script)).stderr
    assert "no rank called" not in hvdrun("-np", "1", "true").stderr


@pytest.mark.parametrize("options", [(), ("--min-np", "1"), ("--dry-run",)])
def test_a_current_folder_that_was_removed_is_named(
    options: tuple[str, ...], tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "gone").mkdir()
    command = shlex.join([*HVDRUN, "-np", "1", *options, "true"])
    result = subprocess.run(
        ["sh", "-c", f"rmdir ../gone; exec {command}"],
        env=environment,
        cwd=tmp_path / "gone",
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("hvdrun: the current folder, in which ranks start, is not there any more")


@pytest.mark.parametrize("module", ["launch.job", "elastic.job", "hosts.agent"])
def test_the_launcher_is_imported_without_the_core(module: str) -> None:
    """Covers a host that cannot open the core: hvdrun and its agents say so in a message of theirs."""
    code = f"import sys, sirtaki.runner.{module}; print('sirtaki.bindings.library' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_a_rank_that_does_not_end_is_named(hvdrun: Run, environment: dict[str, str]) -> None:
    soon = (
        "from sirtaki.runner.cli import hvdrun; from sirtaki.runner.launch import job; "
        "job.FIRST_SECONDS = 0.2; hvdrun.main()"
    )
    command = [
        sys.executable,
        "-c",
        soon,
        "-np",
        "3",
        "sh",
        "-c",
        "[ $SIRTAKI_RANK = 1 ] && exec sleep 1.5; :",
    ]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=FAILSAFE_SECONDS, check=False
    )
    said = [line for line in result.stderr.splitlines() if "still" in line]
    assert said == ["hvdrun: rank 1 still runs; the others ended 0 s ago"]
