"""Files, memory and libraries of a job: protection against other users, links and peers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from launching import FAILSAFE_SECONDS, HVDRUN

from sirtaki.bindings.bootstrap.world_builder import describe_process, topology_of
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import Config, ffi, lib
from sirtaki.bindings.observing.elastic_timeline import ElasticTimeline
from sirtaki.bindings.topology import SharedMemory

LIBRARY = Path(sys.modules["sirtaki.bindings"].__file__ or "").with_name("libsirtaki.so")


def test_memory_that_a_peer_could_shrink_is_refused() -> None:
    """A process that maps such memory would end with SIGBUS."""
    config = Config({})
    size = lib.srt_memory_bytes(config.pointer, 2)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, size)
    context = Context(topology_of(0, [describe_process("", {}), describe_process("", {})]), config)
    bells = [os.eventfd(0) for _ in range(4)]
    memory = SharedMemory(unsealed, 0, 0, [0, 1], bells[:2], bells[2:], [-1, -1], [-1, -1])
    with pytest.raises(ValueError, match="not sealed against shrinking"):
        context.link_memory(memory)
    sealed = lib.srt_memory_create(config.pointer, 2, ffi.new("srt_error *"))
    context.link_memory(SharedMemory(sealed, 0, 0, [0, 1], bells[:2], bells[2:], [-1, -1], [-1, -1]))
    for descriptor in (unsealed, sealed, *bells):
        os.close(descriptor)


def test_a_report_is_not_written_through_a_link(tmp_path: Path) -> None:
    """In a folder that others may write to, a link could lead to any file of the user's."""
    precious = tmp_path / "precious"
    precious.write_text("data")
    reports = tmp_path / "reports"
    reports.mkdir()
    for rank in range(2):
        (reports / f"rank{rank}.json.new").symlink_to(precious)
    script = "import sirtaki.numpy as hvd\nhvd.init()\nif hvd.rank(): raise KeyError\nhvd.allreduce(1.0)"
    subprocess.run(
        [*HVDRUN, "-np", "2", sys.executable, "-c", script],
        env={**os.environ, "SIRTAKI_DUMP_DIRECTORY": str(reports)},
        capture_output=True,
        timeout=FAILSAFE_SECONDS,
    )
    assert precious.read_text() == "data"
    assert (reports / "rank0.json").exists()
    assert not (reports / "rank0.json").is_symlink()


def test_no_timeline_or_report_of_stalls_is_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    for name in ("timeline", "stalls", "changes.worker0.changes"):
        (tmp_path / name).symlink_to(precious)
    script = (
        "import sys, time\n"
        "import sirtaki.numpy as hvd\n"
        "hvd.init()\n"
        "try:\n"
        "    hvd.start_timeline(sys.argv[1])\n"
        "except OSError as error:\n"
        "    print(error)\n"
        "if hvd.rank(): time.sleep(2)\n"
        "hvd.allreduce(1.0)\n"
    )
    ended = subprocess.run(
        [*HVDRUN, "-np", "2", sys.executable, "-c", script, str(tmp_path / "timeline")],
        env={
            **os.environ,
            "SIRTAKI_STALL_REPORT": "0.5",
            "SIRTAKI_STALL_REPORT_FILE": str(tmp_path / "stalls"),
        },
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )
    assert ended.stdout.count("the timeline cannot be written to") == 1, ended.stdout + ended.stderr
    assert "the report could not be written to" in ended.stderr
    timeline = ElasticTimeline(str(tmp_path / "changes"), False)
    timeline.add_slice("x", 1, 2)
    assert precious.read_text() == "data"


def test_the_library_is_hardened_and_stripped() -> None:
    with open(LIBRARY, "rb") as file:
        elf = ELFFile(file)
        assert elf.get_section_by_name(".symtab") is None
        names = {symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()}
    assert "__stack_chk_fail" in names
    assert any(name.endswith("_chk") for name in names - {"__stack_chk_fail"}), "no fortified function"


def test_a_key_that_cannot_be_written_is_told_in_a_line() -> None:
    limit = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", limit, *HVDRUN, "-np", "2", "true"],
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )
    assert ended.returncode == 1
    assert "hvdrun: cannot write the job's key to" in ended.stderr
    assert "File too large" in ended.stderr
    assert "Traceback" not in ended.stderr
