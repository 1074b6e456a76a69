"""The ranks of another host meet those of all hosts over the collector in their agent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, Hosts, Run, Script

from sirtaki.bindings.bootstrap.connection.address import local_addresses

# hvdrun, whose rendezvous is slow: it looks at the report of a failure after all ranks have ended.
SLOW = """
import sys, threading
from sirtaki.runner.cli.hvdrun import main
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

have_ended, waits = threading.Event(), []
close, drain, note = RendezvousServer.close, RendezvousServer.drain, RendezvousServer._note_report

def drain_late(server, *arguments):
    waits.append(server)
    have_ended.set()
    drain(server, *arguments)

def close_at_once(server):
    have_ended.set()
    close(server)

def note_late(server, one, event, text):
    if event == "aborted":
        have_ended.wait()
    if event != "aborted" or waits:  # a server that does not wait would have been closed before
        note(server, one, event, text)

RendezvousServer.drain, RendezvousServer.close = drain_late, close_at_once
RendezvousServer._note_report = note_late
sys.exit(main())
"""


# hvdrun, whose rendezvous does not answer when all ranks have ended.
SILENT = """
import sys
from sirtaki.runner.cli.hvdrun import main
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer

RendezvousServer.drain = lambda server, seconds, then, lost: print("asked", flush=True)
sys.exit(main())
"""


def of_rank(rank: int, result: subprocess.CompletedProcess[str]) -> list[str]:
    mark = f"[{rank}] "
    return [line.removeprefix(mark) for line in result.stdout.splitlines() if line.startswith(mark)]


def test_several_ranks_of_another_host_connect_to_their_agent(
    hvdrun: Run, rank_script: Script, hosts: Hosts
) -> None:
    """Their addresses for other ranks are those of this machine, as without a collector."""
    hosts(hostB={}, hostC={})
    show = """
    client = connect()
    kinds = {one.partition(":")[0] == "unix" for one in os.environ["SIRTAKI_RENDEZVOUS"].split(",")}
    print(kinds, client.all_gather(b"%d" % rank), *client.own_addresses())
    """.replace("\n    ", "\n")
    result = hvdrun("-H", "localhost:1,hostB:2,hostC:1", "python", rank_script(show))
    assert result.returncode == 0, result.stderr
    gathered = [b"0", b"1", b"2", b"3"]
    for rank, is_behind in ((1, True), (2, True), (3, False)):
        (line,) = of_rank(rank, result)
        start = f"{{{is_behind}}} {gathered} "
        assert line.startswith(start)
        assert line.removeprefix(start) in local_addresses()


@pytest.mark.parametrize("options", [[], ["--encrypt"]], ids=["plain", "encrypted"])
def test_init_several_times(hvdrun: Run, rank_script: Script, hosts: Hosts, options: list[str]) -> None:
    hosts(hostB={}, hostC={})
    program = """
    import numpy as np, sirtaki.numpy as hvd
    for _ in range(2):
        hvd.init()
        print(hvd.allreduce(np.ones(3) * hvd.rank(), op=hvd.Sum))
        hvd.shutdown()
    """.replace("\n    ", "\n")
    result = hvdrun(*options, "-H", "hostB:2,hostC:2", "python", rank_script(program))
    assert result.returncode == 0, result.stderr
    for rank in range(4):
        assert of_rank(rank, result) == ["[6. 6. 6.]"] * 2


def test_a_rank_that_ends_in_init_is_named_on_the_ranks_of_all_hosts(
    hvdrun: Run, rank_script: Script, hosts: Hosts
) -> None:
    hosts(hostB={}, hostC={})
    program = """
    client = connect()
    client.all_gather(b"")
    if rank == 2:
        os._exit(0)
    try:
        client.all_gather(b"")
    except RendezvousError as error:
        print(error)
    client.report("finished")
    """.replace("\n    ", "\n")
    result = hvdrun("-H", "localhost:1,hostB:2,hostC:2", "python", rank_script(program))
    for rank in (0, 1, 3, 4):
        (line,) = of_rank(rank, result)
        assert re.search(r"rank 2 has (gone \(its process ended|ended \(exit code 0)", line), line


def run_program(
    program: str, folder: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program that is hvdrun with a change."""
    file = folder / "changed_hvdrun.py"
    file.write_text(program)
    return subprocess.run(
        [sys.executable, file, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )


def test_a_rendezvous_that_does_not_answer_is_not_awaited_for_ever(
    environment: dict[str, str], tmp_path: Path
) -> None:
    result = run_program(SILENT, tmp_path, environment, "-np", "1", "true")
    assert (result.returncode, result.stdout) == (0, "asked\n")


def test_an_exception_that_arrives_after_the_end_of_its_rank_is_shown(
    environment: dict[str, str], rank_script: Script, hosts: Hosts, tmp_path: Path
) -> None:
    hosts(hostB={})
    program = """
    client = init()
    client.all_gather(b"")
    if rank == 1:
        client.report("aborted", "ValueError: no data")
        os._exit(3)
    time.sleep(600)
    """.replace("\n    ", "\n")
    result = run_program(SLOW, tmp_path, environment, "-H", "hostB:2", "python", rank_script(program))
    assert result.returncode == 3
    assert re.search(
        r"rank 1 \(pid \d+ on hostB\) failed with exit code 3: ValueError: no data$", result.stderr, re.M
    )
    assert "may be missing" not in result.stderr
