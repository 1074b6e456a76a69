"""One timeline for a job, and hvdrun's report at the end of a failed job."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, HVDRUN
from timelines import check_trace, read_trace, slices_named

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, WireError
from sirtaki.runner.hosts.lease import HostLease
from sirtaki.runner.hosts.remote import RemoteHost, RemoteJob, RemoteRank
from sirtaki.runner.hosts.ssh import SshOptions
from sirtaki.runner.observe.timeline import JobTimeline, merge_timelines

SCRIPT = """
import os, signal, sys, time
import numpy as np
import sirtaki.numpy as hvd

hvd.init()

def fail(how):
    if hvd.rank() == 1:  # once the others wait
        while len([name for name in os.listdir() if name.endswith(".waits")]) < 2:
            time.sleep(0.01)
        how()
    handle = hvd.allreduce_async(1.0, name="loss")
    open(f"{{hvd.rank()}}.waits", "w").close()
    handle.wait()

def raise_error():
    raise KeyError(7)

def train():
    for step in range(3):
        hvd.allreduce(np.ones(1000), name="gradient")
    {}

train()
"""


def hvdrun(
    tmp_path: Path, ending: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(ending))
    variables = ["env", *(f"{name}={value}" for name, value in environment.items())]
    command = [*variables, *HVDRUN, "-np", "3", *options, sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=FAILSAFE_SECONDS, cwd=tmp_path)


def said(ended: subprocess.CompletedProcess[str]) -> list[str]:
    return [
        line.removeprefix("hvdrun: ") for line in ended.stderr.splitlines() if line.startswith("hvdrun: ")
    ]


def test_one_file_holds_the_timelines_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "t.json.rank7").write_text("[\n{}\n]\n")  # a file of another job
    ended = hvdrun(tmp_path, "pass", "--timeline-filename", "t.json", "--timeline-mark-cycles")
    assert ended.returncode == 0, ended
    events = read_trace(tmp_path / "t.json")
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert slices_named(events, "gradient").count("all-reduce") == 9
    assert any(event["name"] == "DECISION" for event in events)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "train.py"]
    assert said(ended)[-1].startswith(f"the timeline of 3 ranks is in {tmp_path}/t.json")


def test_a_killed_rank_leaves_what_it_has_written(tmp_path: Path) -> None:
    ending = "time.sleep(1); hvd.rank() or os.kill(os.getpid(), signal.SIGKILL); hvd.barrier()"
    ended = hvdrun(tmp_path, ending, "--timeline-filename", "t.json")
    assert ended.returncode == 128 + 9, ended
    assert slices_named(read_trace(tmp_path / "t.json"), "gradient").count("all-reduce") == 9


def test_a_file_without_its_end_is_what_the_format_allows(tmp_path: Path) -> None:
    ended = hvdrun(
        tmp_path,
        "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)",
        HOROVOD_TIMELINE=str(tmp_path / "t.json"),
    )
    assert ended.returncode == 128 + 9, ended
    for name in ("t.json", "t.json.rank1", "t.json.rank2"):
        assert slices_named(check_trace((tmp_path / name).read_text() + "]"), "gradient")


def test_dynamic_begins_no_timeline(tmp_path: Path) -> None:
    ending = "hvd.rank() or (hvd.start_timeline('mine.json'), hvd.stop_timeline())"
    ended = hvdrun(tmp_path, ending, HOROVOD_TIMELINE="DYNAMIC")
    assert ended.returncode == 0, ended
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "train.py"]


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('[\n{"rank": 0, "n": 1},\n{"rank": 0, "n": 2}\n]\n')
    (tmp_path / "t.json.rank10").write_text('[\n{"rank": 10, "n": 1},\n{"rank": 10, "args": {}')
    (tmp_path / "t.json.rank2").write_text('[\n{"rank": 2, "n": 1}')
    (tmp_path / "t.json.rank3").write_text("")
    assert merge_timelines(path) == "4 ranks"
    merged = [(event["rank"], event["n"]) for event in json.loads(path.read_text())]
    assert merged == [(0, 1), (0, 2), (2, 1), (10, 1)]
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]
    assert merge_timelines(tmp_path / "none.json") == ""


def test_files_of_an_earlier_elastic_job_do_not_replace_a_newer_timeline(tmp_path: Path) -> None:
    path, part = tmp_path / "t.json", tmp_path / "t.json.worker0.changes"
    for file in (path, part):
        file.write_text('[\n{"ph": "M"}\n]\n')
    os.utime(part, ns=(1_000, 1_000))
    with pytest.raises(FileExistsError, match="remove those of one of the two jobs"):
        merge_timelines(path)
    assert path.exists()
    assert part.exists()
    os.utime(path, ns=(999, 999))
    assert merge_timelines(path) == "1 worker in 0 generations"
    assert not part.exists()


def test_times_of_other_hosts_are_moved_to_the_first_ones_clock(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for rank, (clock, time) in enumerate(
        [(5_000_000_000, "7.250"), (5_000_000_900, "8.000"), (1_000_000_001, "4000009.001")]
    ):
        head = f'{{"ph":"M","name":"clock","pid":{rank},"args":{{"wall_minus_monotonic_ns":{clock}}}}}'
        text = f'[\n{head},\n{{"ph":"i","name":"\\"ts\\":1.000","pid": {rank}, "ts": {time}}}\n]\n'
        (path.with_name(f"t.json.rank{rank}") if rank else path).write_text(text)
    assert merge_timelines(path) == "3 ranks"
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "i"]
    assert [event["ts"] for event in events] == [7.25, 8.0, 9.002]
    assert {event["name"] for event in events} == {'"ts":1.000'}


@pytest.mark.parametrize("is_elastic", [False, True])
def test_an_agent_sends_the_files_of_its_kind_of_job(tmp_path: Path, is_elastic: bool) -> None:
    of_rank = Frame(MessageKind.TIMELINE, 1, b"[\n")
    of_worker = Frame(MessageKind.WORKER_TIMELINE, 1, b"[\n", 2)
    with selectors.PollSelector() as selector:
        host = RemoteHost("hostB", SshOptions(), selector, None)  # type: ignore[arg-type]
        timeline, lease = JobTimeline(tmp_path / "t.json"), HostLease(15.0, 0.0) if is_elastic else None
        host._job = RemoteJob({1: RemoteRank(1, host)}, None, lambda *_: None, lambda: None, timeline, lease)
        host._receive(of_worker if is_elastic else of_rank)
        with pytest.raises(WireError, match="is not expected"):
            host._receive(of_rank if is_elastic else of_worker)
        with pytest.raises(WireError, match=r"of (worker|rank) -1 is not expected"):
            host._receive(Frame(of_worker.kind if is_elastic else of_rank.kind, -1, of_worker.payload))
    (file,) = tmp_path.iterdir()
    assert file.name == ("t.json.worker1.generation2" if is_elastic else "t.json.rank1")
    assert file.read_bytes() == b"[\n"


@pytest.mark.parametrize("name", ["no/folder/t.json", "folder"])
def test_a_file_that_cannot_be_written_is_refused_before_ranks_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    ended = hvdrun(tmp_path, "pass", "--timeline-filename", name)
    assert ended.returncode == 1, ended
    why = "No such file or directory" if name.startswith("no") else "it is no regular file"
    assert said(ended)[-1] == f"the timeline cannot be written to '{tmp_path / name}': {why}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "train.py"]


def test_the_end_of_a_failed_job_tells_what_each_rank_was_doing(tmp_path: Path) -> None:
    ended = hvdrun(tmp_path, "fail(raise_error)")
    assert ended.returncode == 1, ended
    *_, head, first, second, third, verdict = said(ended)
    assert head == "what each rank was doing when the job failed:"
    for rank, line in ((0, first), (2, third)):
        assert line.startswith(f"  rank {rank} (pid ")
        assert "waited for other ranks to submit 'loss' (all-reduce) for " in line
        assert ", in fail() at train.py:" in line
    assert "rank 1" in second
    assert second.endswith("had nothing in flight")
    assert "failed with exit code 1" in verdict
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("option", [True, False])
def test_reports_are_kept_where_the_user_says(tmp_path: Path, option: bool) -> None:
    ending = "fail(lambda: os.kill(os.getpid(), signal.SIGKILL))"
    if option:
        ended = hvdrun(tmp_path, ending, "--dump-directory", str(tmp_path / "dump"))
    else:
        ended = hvdrun(tmp_path, ending, SIRTAKI_DUMP_DIRECTORY=str(tmp_path / "dump"))
    assert ended.returncode == 128 + 9, ended
    assert any(f"({tmp_path}/dump has more)" in line for line in said(ended))
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["rank0.json", "rank2.json"]
    report = json.loads((tmp_path / "dump" / "rank0.json").read_text())
    assert (report["rank"], report["size"], report["status"]) == (0, 3, "peer_lost")
    assert "rank 1" in report["reason"]
    assert [one["name"] for one in report["unfinished"]] == ["loss"]
    assert [one["name"] for one in report["finished"]] == ["gradient"] * 3
    assert {one["state"] for one in report["finished"]} == {"ok"}
    assert [frame["function"] for frame in report["stack"]] == ["fail", "train", "<module>"]
    assert report["statistics"]["operations"] == 3


def test_a_job_that_ends_well_says_nothing_of_it(tmp_path: Path) -> None:
    ended = hvdrun(tmp_path, "pass", "--dump-directory", str(tmp_path / "dump"))
    assert ended.returncode == 0, ended
    assert not any("doing" in line for line in said(ended))
