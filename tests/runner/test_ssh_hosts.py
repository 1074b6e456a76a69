"""Ranks on other hosts, over a stand-in for ssh: their places, environment and output; possible errors."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, HVDRUN, Hosts, Run, Script, Start, read_terminal

SHOW_PLACE = """
names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
for prefix in ("SIRTAKI", "HOROVOD"):
    print(prefix, *[os.environ[f"{prefix}_{name}"] for name in names])
"""


def test_each_rank_finds_its_place(hvdrun: Run, rank_script: Script, hosts: Hosts) -> None:
    hosts(hostB={}, hostC={})
    result = hvdrun("-H", "localhost:1,hostB:3,hostC:2", "python", rank_script(SHOW_PLACE))
    assert result.returncode == 0, result.stderr
    places = ["0 6 0 1 0 3", "1 6 0 3 1 3", "2 6 1 3 0 2", "3 6 2 3 0 1", "4 6 0 2 2 3", "5 6 1 2 1 2"]
    for rank, place in enumerate(places):
        lines = [line for line in result.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] SIRTAKI {place}", f"[{rank}] HOROVOD {place}"]


def test_ranks_of_all_hosts_meet_at_the_rendezvous(hvdrun: Run, rank_script: Script, hosts: Hosts) -> None:
    hosts(hostB={}, hostC={})
    script = rank_script("print(b''.join(connect().all_gather(b'%d' % rank)).decode())")
    result = hvdrun("-np", "4", "-H", "hostB:2,localhost:1,hostC:8", "python", script)
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] 0123" for rank in range(4)], result.stderr
    assert result.returncode == 0


def test_a_host_without_slots_has_one_rank(hvdrun: Run, hosts: Hosts, tmp_path: Path) -> None:
    hosts(hostB={}, hostC={})
    (tmp_path / "list").write_text("hostB\nhostC slots=2\n")
    result = hvdrun("--hostfile", str(tmp_path / "list"), "sh", "-c", "echo $HOSTNAME")
    assert sorted(result.stdout.splitlines()) == ["[0] hostB", "[1] hostC", "[2] hostC"], result.stderr


def test_what_goes_over_and_what_stays(hvdrun: Run, hosts: Hosts, environment: dict[str, str]) -> None:
    homes = hosts(hostB={"environment": {"LOGIN_ONLY": "there", "BOTH": "there"}})
    environment |= {"BOTH": "here\n'\"$x", "HOME": "/here", "SSH_AUTH_SOCK": "/here", "TMPDIR": "/tmp"}
    environment |= {"CUDA_VISIBLE_DEVICES": "7", "BASH_FUNC_f%%": "() { :; }", "SIRTAKI_NO_SECRET": "1"}
    show = (
        "import os; e = os.environ; print([e.get(n) for n in ('BOTH', 'LOGIN_ONLY', 'HOME', 'SSH_AUTH_SOCK', "
        "'CUDA_VISIBLE_DEVICES', 'BASH_FUNC_f%%', 'TMPDIR')], os.getcwd(), e['PATH'])"
    )
    result = hvdrun("-H", "hostB:1", "python", "-c", show, cwd="/usr")
    path = os.pathsep.join(dict.fromkeys(environment["PATH"].split(os.pathsep)))
    expected = ["here\n'\"$x", "there", str(homes / "hostB"), None, None, None, str(homes / "hostB")]
    assert result.stdout.startswith(f"[0] {expected} /usr {path}"), result.stdout + result.stderr
    assert result.returncode == 0


def test_python_is_the_same_everywhere(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={})
    result = hvdrun("-H", "localhost:1,hostB:1", "python", "-c", "import sys; print(sys.prefix)")
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] {sys.prefix}" for rank in (0, 1)]


def test_cores_are_shared_by_the_ranks_of_each_host(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={})
    cores = len(os.sched_getaffinity(0))
    result = hvdrun("-H", f"localhost:1,hostB:{2 * cores}", "sh", "-c", "echo $OMP_NUM_THREADS")
    assert "[1] 1" in result.stdout.splitlines()
    assert "hvdrun: 1 rank on " in result.stderr


def test_what_a_login_prints_does_no_harm(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={"stdout": "Welcome!\nsirt\n", "stderr": "motd\n"})
    result = hvdrun("-H", "hostB:1", "echo", "hello")
    assert (result.returncode, result.stdout) == (0, "[0] hello\n")
    assert "[hostB] motd\n" in result.stderr


DENIED = "ada@hostB: Permission denied (publickey,password).\n"
NOT_VERIFIED = "Host key verification failed.\n"
UNKNOWN = f"No ED25519 host key is known for hostB and you have requested strict checking.\n{NOT_VERIFIED}"
CHANGED = f"@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n{NOT_VERIFIED}"
MISSING = f"{sys.executable}: Error while finding module specification (No module named 'sirtaki')\n"


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (None, "there is no host called hostB: check the name, or write its address"),
        ({"exit_code": 255, "stderr": DENIED}, "`ssh-copy-id -p 2222 hostB` puts your key there"),
        ({"exit_code": 255, "stderr": UNKNOWN}, "run `ssh -p 2222 hostB` once, compare the fingerprint"),
        ({"exit_code": 255, "stderr": CHANGED}, "`ssh-keygen -R '[hostB]:2222'` removes the old one"),
        (
            {"exit_code": 255, "stderr": "ssh: connect to host hostB port 2222: Connection timed out\n"},
            "hostB cannot be reached by ssh: check that it is up",
        ),
        (
            {"exit_code": 255, "stderr": "Bad thing\n"},
            "ssh to hostB failed: try `ssh -p 2222 hostB true` (Bad thing)",
        ),
        ({"replace": [sys.executable, "/no/such/python"]}, f"hostB has no Python in {sys.executable}"),
        ({"exit_code": 1, "stderr": MISSING}, "-m pip install sirtaki=="),
        (
            {"exit_code": 0, "stdout": "This account is closed.\n"},
            "exit code 0: run `ssh -p 2222",
        ),
        ({"stdout": "x" * 100_000}, "hostB: the login there has printed more than 65536 bytes"),
    ],
)
def test_a_host_that_cannot_take_part(
    hvdrun: Run, hosts: Hosts, behaviour: dict[str, object] | None, text: str
) -> None:
    hosts(**({} if behaviour is None else {"hostB": behaviour}))
    result = hvdrun("-H", "localhost:1,hostB:1", "-p", "2222", "echo", "started")
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_all_hosts_that_cannot_take_part_are_named_at_once(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={"exit_code": 255, "stderr": DENIED}, hostC={})
    result = hvdrun("-H", "hostB:1,hostC:1,hostD:1", "echo", "started")
    assert (result.returncode, result.stdout) == (1, "")
    said = [line for line in result.stderr.splitlines() if line.startswith("hvdrun: ")]
    assert [line.split()[1] for line in said] == ["hostB", "there"]
    assert "there is no host called hostD" in said[1]


def test_another_version_is_refused(hvdrun: Run, hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(
        "import sys, sirtaki.bindings._version as v; v.VERSION = '0.0.1'\n"
        "from sirtaki.runner.hosts.agent import main; sys.exit(main())"
    )
    hosts(hostB={"replace": ["-m sirtaki.runner.hosts.agent", str(tmp_path / "old.py")]})
    result = hvdrun("-H", "hostB:1", "echo", "started")
    assert result.returncode == 1
    assert "hvdrun: hostB has sirtaki 0.0.1, and this host " in result.stderr


def test_a_folder_or_program_that_is_not_there(
    hvdrun: Run, hosts: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "gone.py").write_text(
        "import os, sys\nfrom sirtaki.runner.hosts import agent\n"
        "os.rename(os.environ['GOING'], os.environ['GOING'] + '.gone')\nsys.exit(agent.main())"
    )
    going = {"GOING": str(tmp_path / "here")}
    hosts(
        hostB={"replace": ["-m sirtaki.runner.hosts.agent", str(tmp_path / "gone.py")], "environment": going}
    )
    result = hvdrun("-H", "hostB:1", "echo", "started", cwd=tmp_path / "here")
    assert result.returncode == 1
    assert f"hvdrun: hostB has no folder {tmp_path / 'here'} as hvdrun's host has" in result.stderr
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    going = {"GOING": str(program)}
    hosts(
        hostB={"replace": ["-m sirtaki.runner.hosts.agent", str(tmp_path / "gone.py")], "environment": going}
    )
    result = hvdrun("-H", "hostB:1", str(program))
    assert result.returncode == 1
    assert f"hvdrun: hostB has no program {program} as hvdrun's host has" in result.stderr


def test_a_program_that_cannot_be_run_there(hvdrun: Run, hosts: Hosts, tmp_path: Path) -> None:
    hosts(hostB={})
    (tmp_path / "broken").write_text("\0\0\0\0")
    (tmp_path / "broken").chmod(0o755)
    result = hvdrun("-H", "hostB:2", str(tmp_path / "broken"))
    assert result.returncode == 126
    assert f"hvdrun: hostB: {tmp_path / 'broken'} is neither a program nor a script" in result.stderr


def test_without_ssh(hvdrun: Run, environment: dict[str, str], tmp_path: Path) -> None:
    result = hvdrun("-H", "hostB:1", "/bin/true", env={**environment, "PATH": str(tmp_path)})
    assert result.returncode == 2
    assert "there is no ssh on the PATH here: install OpenSSH's client" in result.stderr


def test_who_is_awaited_is_told(
    start_hvdrun: Start, rank_script: Script, hosts: Hosts, tmp_path: Path
) -> None:
    hosts(hostB={})
    go = tmp_path / "go"
    script = rank_script(f"while rank == 2 and not os.path.exists({str(go)!r}): time.sleep(0.01)\ninit()")
    process = start_hvdrun("-H", "localhost:1,hostB:2", "python", script)
    assert process.stderr is not None
    line = b"hvdrun: 2 of 3 ranks are here; waiting for rank 2 (hostB)\n"
    assert line in iter(process.stderr.readline, b"")  # consumes the output up to the line
    go.touch()
    assert process.wait(FAILSAFE_SECONDS) == 0


def test_a_terminal_shows_who_is_awaited_until_all_are_here(
    rank_script: Script, hosts: Hosts, environment: dict[str, str], tmp_path: Path
) -> None:
    hosts(hostB={})
    go = tmp_path / "go"
    script = rank_script(f"while rank and not os.path.exists({str(go)!r}): time.sleep(0.01)\ninit()")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*HVDRUN, "-H", "localhost:1,hostB:1", "python", script], environment)
    line = b"hvdrun: 1 of 2 ranks are here; waiting for rank 1 (hostB)\r"
    shown = b""
    while line not in shown:
        shown += os.read(terminal, 65536)
    go.touch()
    shown += read_terminal(terminal)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    assert shown.rpartition(line)[2].startswith(b"\x1b[K"), shown
