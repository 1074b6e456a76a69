"""Checkpoints: complete or not there, refused if others may have written them, and read by the next ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic.running import QUICK, check_exact, run_job

import sirtaki.numpy as hvd
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.elastic import state as states
from sirtaki.common.elastic.state import Checkpoints, State


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_of_two_checkpoints_is_read(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path / "there", 10)
    for number in range(4):
        writer.write(10 * number, {"number": number})
        writer.wait()
    assert names(tmp_path / "there") == ["3.checkpoint", "4.checkpoint"]
    assert Checkpoints(tmp_path / "there", 1).newest() == {"number": 3}


def test_there_is_none_in_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere", 1).newest() is None


def test_a_commit_is_due_when_enough_have_passed(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, 3)
    due = []
    for commit in range(8):
        if writer.is_due(commit):
            due.append(commit)
            writer.write(commit, 0)
            writer.wait()
    assert due == [3, 6]


def test_a_checkpoint_that_is_not_complete_is_not_read(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, 1)
    writer.write(1, "whole")
    writer.wait()
    (tmp_path / "2.new").write_bytes(b"half")
    assert writer.newest() == "whole"


def test_a_writer_that_wakes_up_changes_no_checkpoint_of_another_one(tmp_path: Path) -> None:
    """Stops a writer in the middle of its file, while another one writes a checkpoint."""
    is_writing, goes_on = threading.Event(), threading.Event()

    class Slow:
        def __reduce__(self) -> tuple[type[str], tuple[str]]:
            is_writing.set()
            goes_on.wait()
            return str, ("old",)

    def refuse() -> None:
        raise HorovodInternalError("it was given up")

    stopped, other = Checkpoints(tmp_path, 1, refuse), Checkpoints(tmp_path, 1)
    stopped.write(1, Slow())
    is_writing.wait()
    other.write(1, "new")
    other.wait()
    goes_on.set()
    stopped.wait()
    assert other.newest() == "new"
    assert names(tmp_path) == ["1.checkpoint"]


def test_a_process_that_is_no_rank_any_more_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise HorovodInternalError("this process was given up")

    monkeypatch.setattr(states, "fence", refuse)
    state = hvd.elastic.ObjectState(step=3)
    state.keep_checkpoints(tmp_path, 1)
    writer = state._checkpoints
    assert writer is not None
    writer.write(1, state.checkpoint())
    writer.wait()
    assert names(tmp_path) == []
    assert "could not be written: this process was given up" in capfd.readouterr().err


def test_files_that_other_writers_have_left_behind_are_removed(tmp_path: Path) -> None:
    (tmp_path / f"4.{'0' * 16}.new").write_bytes(b"half")
    (tmp_path / "mine.new").write_bytes(b"of the user")
    writer = Checkpoints(tmp_path, 1)
    writer.write(1, "whole")
    writer.wait()
    assert names(tmp_path) == ["1.checkpoint", "mine.new"]


# An unknown class raises AttributeError, an unknown module ImportError, a wrong index IndexError.
DAMAGED = (b"", b"\x80\x04nonsense", b"text", b"cos\nnone\n.", b"cnone_\nnone\n.", b"\x80\x041.", b"h\x05.")


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_checkpoint_is_an_error_that_names_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "1.checkpoint").write_bytes(content)
    (tmp_path / "1.checkpoint").chmod(0o600)
    with pytest.raises(HorovodInternalError, match=r"1\.checkpoint cannot be read"):
        Checkpoints(tmp_path, 1).newest()


@pytest.mark.parametrize("content", DAMAGED)
def test_the_checkpoint_before_a_damaged_one_is_read(
    content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = Checkpoints(tmp_path, 1)
    for number in range(2):
        writer.write(number, {"number": number})
        writer.wait()
    (tmp_path / "2.checkpoint").write_bytes(content)
    assert writer.newest() == {"number": 0}
    (line,) = capfd.readouterr().err.splitlines()
    assert "2.checkpoint cannot be read: " in line
    assert line.endswith("1.checkpoint, which is older")
    writer.write(2, {"number": 2})
    writer.wait()
    assert writer.newest() == {"number": 2}


@pytest.mark.parametrize("place", [0, 17, 30, 200, -1])  # in the magic, format, digest, data, and end
def test_a_flipped_bit_is_noticed(place: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = Checkpoints(tmp_path, 1)
    for number in range(2):
        writer.write(number, [float(number)] * 100)
        writer.wait()
    content = bytearray((tmp_path / "2.checkpoint").read_bytes())
    content[place] ^= 1
    (tmp_path / "2.checkpoint").write_bytes(content)
    if place == 17:
        with pytest.raises(HorovodInternalError, match="has format 65538, and this sirtaki reads 2"):
            Checkpoints(tmp_path, 1).newest()
    else:
        assert Checkpoints(tmp_path, 1).newest() == [0.0] * 100
        assert "2.checkpoint cannot be read" in capfd.readouterr().err


def test_a_damaged_checkpoint_is_none_of_the_two_that_are_kept(tmp_path: Path) -> None:
    for number in range(3):
        writer = Checkpoints(tmp_path, 1)
        writer.write(number, number)
        writer.wait()
    (tmp_path / "3.checkpoint").write_bytes(b"")
    writer = Checkpoints(tmp_path, 1)
    writer.write(3, 3)
    writer.wait()
    assert names(tmp_path) == ["2.checkpoint", "3.checkpoint", "4.checkpoint"]
    writer.write(4, 4)
    writer.wait()
    assert names(tmp_path) == ["4.checkpoint", "5.checkpoint"]


def test_an_older_file_goes_when_the_name_of_the_new_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fsync(descriptor: int) -> None:
        seen.append((os.path.isdir(f"/proc/self/fd/{descriptor}"), names(tmp_path)))

    writer = Checkpoints(tmp_path, 1)
    for number in range(2):
        writer.write(number, number)
        writer.wait()
    monkeypatch.setattr(os, "fsync", fsync)
    writer.write(2, 2)
    writer.wait()
    (is_folder, before), (is_folder_then, after) = seen
    assert (is_folder, is_folder_then) == (False, True)
    assert "3.checkpoint" not in before
    assert after == ["1.checkpoint", "2.checkpoint", "3.checkpoint"]
    assert names(tmp_path) == ["2.checkpoint", "3.checkpoint"]


def test_if_all_checkpoints_are_damaged_the_newest_is_named(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.checkpoint").write_bytes(b"text")
        (tmp_path / f"{number}.checkpoint").chmod(0o600)
    with pytest.raises(HorovodInternalError, match=r"2\.checkpoint cannot be read"):
        Checkpoints(tmp_path, 1).newest()


def test_a_checkpoint_that_others_can_write_is_refused(tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, 1)
    writer.write(1, "content")
    writer.wait()
    os.chmod(tmp_path / "1.checkpoint", 0o666)
    with pytest.raises(HorovodInternalError, match="may have been written by another user"):
        writer.newest()


class Planted:
    """Unpickled, it makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_of_another_user_is_not_unpickled_through_a_link(
    link: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is root's, which any user can fill: the arguments of a setuid program, in /proc."""
    folder, foreign, trace = tmp_path / "folder", tmp_path / "foreign", tmp_path / "trace"
    folder.mkdir(mode=0o700)
    writer = Checkpoints(tmp_path / "theirs", 1)
    writer.write(1, Planted(trace))
    writer.wait()
    (tmp_path / "theirs" / "1.checkpoint").rename(foreign)
    foreign.chmod(0o444)
    link(foreign, folder / "9.checkpoint")
    if link is os.link:
        real = os.fstat

        def of_another_user(descriptor: int) -> os.stat_result:
            return os.stat_result((*real(descriptor)[:4], os.getuid() + 1, *real(descriptor)[5:]))

        monkeypatch.setattr(os, "fstat", of_another_user)
    with pytest.raises(HorovodInternalError, match=r"is a link|may have been written by another user"):
        Checkpoints(folder, 1).newest()
    assert not trace.exists()


def test_a_pipe_in_the_place_of_a_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.checkpoint", 0o600)
    with pytest.raises(HorovodInternalError, match="may have been written by another user"):
        Checkpoints(tmp_path, 1).newest()


def test_a_folder_into_which_others_can_put_files_is_neither_read_nor_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = Checkpoints(tmp_path, 1)
    writer.write(1, "content")
    writer.wait()
    os.chmod(tmp_path, 0o770)
    with pytest.raises(HorovodInternalError, match="other users can put files into the folder"):
        writer.newest()
    writer.write(2, "content")
    writer.wait()
    assert "could not be written: other users can put files" in capfd.readouterr().err
    assert names(tmp_path) == ["1.checkpoint"]


def test_a_failure_to_write_is_told_and_harmless(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = Checkpoints(tmp_path / "file" / "folder", 1)
    (tmp_path / "file").write_text("not a folder")
    writer.write(1, "content")
    writer.wait()
    assert "could not be written" in capfd.readouterr().err


def test_a_state_of_ones_own_needs_two_methods(tmp_path: Path) -> None:
    class Own(State):
        def save(self) -> None: ...

    with pytest.raises(NotImplementedError, match="Own has no checkpoint"):
        Own().checkpoint()


def test_an_object_state_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    state = hvd.elastic.ObjectState(step=3, w=np.arange(4.0))
    writer = Checkpoints(tmp_path, 1)
    writer.write(1, state.checkpoint())
    writer.wait()
    other = hvd.elastic.ObjectState(step=0, w=np.zeros(4))
    other.load_checkpoint(writer.newest())
    assert other.step == 3
    assert list(other.w) == [0.0, 1.0, 2.0, 3.0]
    other.restore()
    assert other.step == 3


THREE = ("-np", "3", "--min-np", "1", *QUICK)


def test_a_job_that_has_lost_all_ranks_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    faults = [f"{victim}:step:40" for victim in range(3)]
    job = run_job(THREE, "numpy_training.py", 200, 0.005, *faults, CHECKPOINTS=str(tmp_path), EVERY="5")
    check_exact(job, 200, {3, 4, 5})
    assert "all ranks were lost: new ones start from the newest checkpoint" in job.text
    assert all(result["started_at"] >= 30 for result in job.results)


def test_a_second_job_starts_from_the_last_checkpoint_of_the_first_that_is_whole(tmp_path: Path) -> None:
    variables = {"CHECKPOINTS": str(tmp_path), "EVERY": "1"}
    first = run_job(THREE, "numpy_training.py", 60, 0.01, "1:raise-step:12", **variables)
    assert first.code == 1
    before, newest = sorted(tmp_path.glob("*.checkpoint"), key=lambda path: int(path.stem))
    newest.write_bytes(newest.read_bytes()[:-20])
    second = run_job(THREE, "numpy_training.py", 60, 0.0, **variables)
    check_exact(second, 60, {0, 1, 2})
    assert f"starts from {before}, which is older" in second.text
    assert all(result["started_at"] >= 7 for result in second.results)
