"""Ranks on the nodes of a Slurm job whose agents srun starts, with a stand-in for srun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, Run, Script, Start, is_running, read_pids, wait_until

from sirtaki.runner.hosts.agent_launcher import SrunOptions
from sirtaki.runner.hosts.channel import LineDecoder, encode_lines

Nodes = Callable[..., Path]

LONG = """
import pathlib
folder = pathlib.Path(__file__).parent
(folder / f"{os.getpid()}.pid").write_text(f"{os.getpid()}\\n")
init()
time.sleep(300)
"""
LEASE_SECONDS = 4.0
WITH_SHORT_LEASE = (
    sys.executable,
    "-c",
    "import sys; from sirtaki.runner.hosts.agent_launcher import SrunOptions; "
    f"SrunOptions.lease_seconds = {LEASE_SECONDS}; "
    "from sirtaki.runner.cli.hvdrun import main; sys.exit(main())",
)


def test_ranks_of_all_nodes_meet_without_a_list_of_hosts(
    hvdrun: Run, rank_script: Script, nodes: Nodes
) -> None:
    nodes(node2={}, node3={})
    script = rank_script(
        "print(b''.join(connect().all_gather(b'%d' % rank)).decode(), os.environ.get('SLURMD_NODENAME'))"
    )
    result = hvdrun("--launcher", "srun", "python", script)
    where = ["node1", "node2", "node2", "node3", "node3"]
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(where)
    for rank, line in enumerate(sorted(result.stdout.splitlines())):
        assert line.startswith(f"[{rank}] 01234 ")
    said = "hvdrun: the hosts are those of Slurm job 7: localhost:1,node2:2,node3:2 (--hosts names others)"
    assert said in result.stderr.splitlines()


def test_what_the_ranks_write_comes_over_byte_by_byte(hvdrun: Run, nodes: Nodes) -> None:
    nodes(node2={"stdout": "a prolog speaks\n"})
    program = "import sys; sys.stdout.write(''.join(chr(32 + i * i % 90) for i in range(200_000)) + '\\n')"
    result = hvdrun("--launcher", "srun", "-H", "node2:1", "python", "-c", program)
    expected = "".join(chr(32 + i * i % 90) for i in range(200_000))
    assert (result.returncode, result.stdout) == (0, f"[0] {expected}\n"), result.stderr


def test_nothing_secret_is_in_the_arguments_or_the_environment(
    start_hvdrun: Start, rank_script: Script, nodes: Nodes, tmp_path: Path, environment: dict[str, str]
) -> None:
    homes = nodes(node2={})
    environment |= {"TMPDIR": str(homes), "SIRTAKI_KEY": "5a" * 32}
    process = start_hvdrun("--launcher", "srun", "-H", "node2:1", "python", rank_script(LONG))
    read_pids(tmp_path, 1)
    (key_file,) = homes.glob("node2/sirtaki-*/key")
    key = key_file.read_text().strip()
    started = (homes / "node2" / "srun.json").read_text()
    assert len(key) == 64
    assert key not in started
    assert "5a5a" not in started
    assert json.loads(started)["arguments"][-2:] == ["sirtaki.runner.hosts.agent", "--lines"]
    process.send_signal(signal.SIGINT)
    assert process.wait(FAILSAFE_SECONDS) == 130


@pytest.mark.parametrize("victim", ["hvdrun", "srun"])
def test_kill_9_leaves_nothing(
    start_hvdrun: Start, rank_script: Script, nodes: Nodes, tmp_path: Path, victim: str
) -> None:
    homes = nodes(node2={})
    process = start_hvdrun("--launcher", "srun", "-H", "localhost:1,node2:1", "python", rank_script(LONG))
    pids = read_pids(tmp_path, 2)
    srun = int((homes / "node2" / "srun.pid").read_text())
    os.kill(process.pid if victim == "hvdrun" else srun, signal.SIGKILL)
    _, errors = process.communicate(timeout=FAILSAFE_SECONDS)
    if victim == "srun":
        assert process.returncode == 1
        why = "the srun process for it was killed by signal 9"
        assert f"hvdrun: the host node2 was lost, and rank 1 with it: {why}" in errors.decode()
    wait_until(lambda: not any(is_running(pid) for pid in [*pids, srun]), "all ranks have ended")
    wait_until(lambda: not list(homes.glob("*/sirtaki-*")), "the keys have been removed")


def test_ranks_end_with_the_lease_if_the_end_of_srun_leaves_their_input_open(
    rank_script: Script, nodes: Nodes, tmp_path: Path, environment: dict[str, str]
) -> None:
    homes = nodes(node2={"keeps_input": True})
    arguments = ("--launcher", "srun", "-H", "node2:1", "python", rank_script(LONG))
    process = subprocess.Popen([*WITH_SHORT_LEASE, *arguments], env=environment)
    (pid,) = read_pids(tmp_path, 1)
    process.kill()
    process.wait()
    wait_until(lambda: not is_running(pid), "the rank has ended")
    wait_until(lambda: not list(homes.glob("*/sirtaki-*")), "the key has been removed")


def test_a_job_outlives_the_lease_of_its_agents(nodes: Nodes, environment: dict[str, str]) -> None:
    nodes(node2={})
    arguments = ("--launcher", "srun", "-H", "localhost:1,node2:1", "sleep", str(2.5 * LEASE_SECONDS))
    done = subprocess.run([*WITH_SHORT_LEASE, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_step_that_ends_before_its_agent_has_answered(hvdrun: Run, nodes: Nodes) -> None:
    nodes(node2={"breaks_after": "srt:"})
    result = hvdrun("--launcher", "srun", "-H", "node2:1", "true")
    assert result.returncode == 1
    assert "srun could not start hvdrun's agent on node2" in result.stderr


def test_a_lost_agent_names_the_node_and_its_ranks(hvdrun: Run, nodes: Nodes) -> None:
    nodes(node2={})
    script = "[ $SIRTAKI_RANK = 1 ] && kill -KILL $PPID; exec sleep 300"
    result = hvdrun("--launcher", "srun", "-H", "localhost:1,node2:1", "sh", "-c", script)
    assert result.returncode == 1
    why = "its step of the Slurm job ended (srun ended with exit code 137)"
    assert result.stderr.splitlines()[-1] == f"hvdrun: the host node2 was lost, and rank 1 with it: {why}"


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (None, "node2 is not a node of this Slurm job: check the name, or ask for it in salloc"),
        ({"replace": ["-m", "-no-such-option"]}, "srun could not start hvdrun's agent on node2"),
        (
            {"exit_code": 1, "stderr": "srun: unrecognized option '--overlap'\n"},
            "hvdrun needs the srun of Slurm 20.11 or newer",
        ),
        (
            {"exit_code": 1, "stderr": "python: No module named 'sirtaki'\n"},
            "has no sirtaki",
        ),
        ({"exit_code": 1, "stderr": "srun: error: odd\n"}, "(exit code 1): try `srun --nodes=1"),
    ],
)
def test_a_node_that_cannot_take_part(
    hvdrun: Run, nodes: Nodes, behaviour: dict[str, object] | None, text: str
) -> None:
    nodes(**({} if behaviour is None else {"node2": behaviour}))
    result = hvdrun("--launcher", "srun", "-H", "localhost:1,node2:1", "echo", "started")
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_outside_of_a_job_srun_is_refused(hvdrun: Run) -> None:
    result = hvdrun("--launcher", "srun", "-H", "node2:1", "true")
    assert result.returncode != 0
    assert "--launcher srun starts ranks on the nodes of a Slurm job" in result.stderr


@pytest.mark.parametrize("option", ["--ssh-port", "--ssh-identity-file"])
def test_options_of_ssh_have_no_meaning_for_srun(hvdrun: Run, nodes: Nodes, option: str) -> None:
    nodes(node2={})
    result = hvdrun("--launcher", "srun", option, "22", "true")
    assert result.returncode != 0
    assert f"{option} is for ssh" in result.stderr


def test_a_dry_run_shows_srun(hvdrun: Run, nodes: Nodes) -> None:
    nodes(node2={})
    result = hvdrun("--launcher", "srun", "--dry-run", "python", "train.py")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "node2: ranks 1 to 2" in lines
    assert lines[-1].split()[:3] == ["srun", "--nodes=1", "--ntasks=1"]
    assert "--nodelist=node2" in lines[-1]


def test_encryption_whose_key_slurm_carries_is_told(hvdrun: Run, nodes: Nodes) -> None:
    nodes(node2={})
    told = "their key goes to other nodes through Slurm"
    assert told in hvdrun("--launcher", "srun", "--encrypt", "--dry-run", "true").stdout
    assert told not in hvdrun("--launcher", "srun", "--dry-run", "true").stdout


def test_an_elastic_job_goes_on_without_a_lost_node(
    hvdrun: Run, nodes: Nodes, tmp_path: Path, environment: dict[str, str]
) -> None:
    nodes(node2={})
    script = tmp_path / "elastic.py"
    script.write_text(
        """
import os, signal
import numpy as np, sirtaki.numpy as hvd
hvd.init()
state = hvd.elastic.ObjectState(step=0)
@hvd.elastic.run
def train(state):
    while state.step < 20 or hvd.size() > 1:
        if state.step == 5 and hvd.size() == 3 and hvd.rank() == 2:
            os.kill(os.getppid(), signal.SIGKILL)  # its agent
        hvd.allreduce(np.ones(2), op=hvd.Sum, name="x")
        state.step += 1
        state.commit()
    return hvd.size(), state.step >= 20
print(train(state))
"""
    )
    arguments = ("--launcher", "srun", "-np", "3", "--min-np", "1", "--blacklist-cooldown-range", "60", "60")
    result = hvdrun(*arguments, "python", str(script))
    assert result.returncode == 0, result.stderr
    assert [line.partition("] ")[2] for line in result.stdout.splitlines()] == ["(1, True)"], result.stderr
    assert "node2 was lost: its step of the Slurm job ended" in result.stderr


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100_000])
def test_lines_stand_for_bytes_in_whatever_pieces_they_come(size: int) -> None:
    data = bytes(index * 7 % 256 for index in range(100_001))
    lines = encode_lines(data[:50_000]) + encode_lines(data[50_000:])
    assert max(map(len, lines.split(b"\n"))) < 1024
    decode = LineDecoder()
    pieces = [decode(lines[at : at + size]) for at in range(0, len(lines), size)]
    assert b"".join(pieces) + decode(b"") == data


def test_other_lines_stay_as_they_are() -> None:
    decode = LineDecoder()
    assert decode(b"a prolog\nsrt:not base64\n" + encode_lines(b"data") + b"the rest") == (
        b"a prolog\nsrt:not base64data"
    )
    assert decode(b"") == b"the rest"


def test_variables_that_srun_would_read_as_options_stay_behind() -> None:
    kept = {"PATH": "/bin", "HOME": "/home/ada", "SLURM_JOB_ID": "7"}
    changed = {"SLURM_LABELIO": "1", "SLURM_CPUS_PER_TASK": "2", "TMPDIR": "/scratch/7", "SIRTAKI_KEY": "x"}
    assert SrunOptions().environment({**kept, **changed}) == kept
