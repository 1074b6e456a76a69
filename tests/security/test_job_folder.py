"""A job's private folder: kept from programs that clean temporary files, and never another user's."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirtaki.bindings.bootstrap.elastic.loaded_modules import list_path, write_list
from sirtaki.bindings.bootstrap.job import read_key, write_key
from sirtaki.bindings.observing.ownership import held_folder
from sirtaki.bindings.observing.watch_marks import FOLDER, FOR_NOW, watch_for_now
from sirtaki.runner.launch import job_folder
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.job_folder import JobFolder
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.top.jobs import find_job


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    with Reaper() as running:
        yield running


@pytest.fixture
def folder(reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return JobFolder(reaper)


def test_a_folder_is_locked_while_the_job_runs(folder: JobFolder) -> None:
    """systemd-tmpfiles skips a folder on which another process holds a lock."""
    descriptor = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_removed_key_is_written_again(folder: JobFolder) -> None:
    os.unlink(folder.key_file)
    folder.restore_key()
    assert read_key(folder.key_file) == folder.key
    shutil.rmtree(folder.path)
    folder.restore_key()
    assert read_key(folder.key_file) == folder.key
    test_a_folder_is_locked_while_the_job_runs(folder)


def test_a_key_is_not_written_into_a_folder_of_others(folder: JobFolder) -> None:
    shutil.rmtree(folder.path)
    folder.path.mkdir()
    folder.path.chmod(0o777)
    with pytest.raises(PermissionError, match="is not this job's folder any more"):
        folder.restore_key()
    assert list(folder.path.iterdir()) == []


def test_a_full_disk_is_left_for_another(
    reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, key: bytes | None) -> bytes:
        if path.startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_key(path, key)

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(job_folder, "write_key", full)
    folder = JobFolder(reaper, b"k" * 32)
    assert not folder.path.is_relative_to(tmp_path)
    assert read_key(folder.key_file) == b"k" * 32
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(folder.path)
    monkeypatch.setattr(job_folder, "write_key", lambda path, key: full(str(tmp_path), key))
    with pytest.raises(LaunchError, match=r"No space left on device\. Set TMPDIR"):
        JobFolder(reaper)


def test_a_folder_that_is_held_does_not_become_another_users(tmp_path: Path) -> None:
    own, precious = tmp_path / "job", tmp_path / "precious"
    own.mkdir(0o700)
    held = held_folder(own)
    own.rename(tmp_path / "away")  # as if it had been removed: a descriptor outlives the name
    own.mkdir()
    (own / FOLDER).mkdir()
    (own / FOLDER / FOR_NOW).symlink_to(precious)
    watch_for_now(held / FOLDER)
    assert not precious.exists()
    assert (tmp_path / "away" / FOLDER / FOR_NOW).exists()
    own.chmod(0o755)
    with pytest.raises(PermissionError, match="another user"):
        held_folder(own)
    write_list(str(own))
    assert not os.path.lexists(list_path(str(own)))


def test_top_leaves_a_folder_of_others_alone(tmp_path: Path) -> None:
    planted, mine, precious = tmp_path / "job", tmp_path / "mine", tmp_path / "precious"
    (planted / FOLDER).mkdir(parents=True)
    mine.write_text("a file of this user's")
    (planted / "key").symlink_to(mine)
    (planted / FOLDER / FOR_NOW).symlink_to(precious)
    planted.chmod(0o755)
    with pytest.raises(LaunchError, match="belongs to another user"):
        find_job(str(planted))
    link = tmp_path / "link"
    link.symlink_to(planted)
    with pytest.raises(LaunchError, match="cannot be watched"):
        find_job(str(link))
    assert not precious.exists()


def test_a_folder_is_held_no_longer_than_its_owner(folder: JobFolder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        find_job(str(folder.path))
    assert len(os.listdir("/proc/self/fd")) == before
