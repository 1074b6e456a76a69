"""The simulator of many ranks: real processes send the bytes that simulated ranks send, and counts follow
from the structure of the world."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import ENCRYPTED, world

import sirtaki.numpy as numpy_hvd
from sirtaki.bindings.bootstrap.connection.wire import HEADER as MESSAGE_HEADER

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEADER = 16  # bytes of a frame
WORLDS = 5
CONTROL = 112  # bytes of the Decision about one known all-reduce


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports modules of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def padded(body: int) -> int:
    return (body + 15) // 16 * 16


def sent_bytes(ranks: int, body: Callable[[int], object], steps: int) -> int:
    """Returns the bytes, without encryption, that rank 0 of a real world has sent after some steps of a body.

    Each rank is on a host of its own. Ranks that others wait for are reported, too, in some worlds: the least
    of several is that of ranks that are on time.
    """

    def as_rank() -> int:
        for step in range(steps):
            body(step)
        numpy_hvd.barrier(name="end")
        return sum(row["bytes"] for row in numpy_hvd.stats()["sent"])

    found = []
    for _ in range(WORLDS):
        with world(ranks, ENCRYPTED) as real:
            found.append(int(real.run(as_rank)[0]))
    return min(found)


@pytest.mark.parametrize("ranks", [3, 4])
def test_real_ranks_send_the_bytes_of_simulated_negotiations(benchmarks: Any, ranks: int) -> None:
    drive = benchmarks("common.native").run
    few, more = (
        sent_bytes(ranks, lambda _: numpy_hvd.barrier(name="allreduce.model.layers.0.weight"), steps)
        for steps in (2, 5)
    )
    found = drive("negotiation", ranks=ranks, each=1, barriers=1, tensors=1, steps=3)
    assert more - few == 3 * found["steady"]["bytes_out"]
    assert found["steady"]["frames_of_all"] == 2 * (ranks - 1)


@pytest.mark.parametrize(("ranks", "size"), [(4, 4_000_000), (2, 1024)])
def test_real_ranks_send_the_bytes_of_simulated_allreduces(benchmarks: Any, ranks: int, size: int) -> None:
    drive = benchmarks("common.native").run

    def reduce(_: int) -> None:
        numpy_hvd.allreduce_(np.zeros(size // 4, np.float32), op=numpy_hvd.Sum, name="gradient")

    few, more = (sent_bytes(ranks, reduce, steps) for steps in (2, 3))
    model = drive("allreduce", ranks=ranks, each=1, bytes=size)
    assert more - few == model["bytes"] + (ranks - 1) * CONTROL


def test_the_model_of_an_allreduce_has_the_frames_of_its_schedule(benchmarks: Any) -> None:
    drive = benchmarks("common.native").run
    size, hosts, each = 8 << 20, 6, 4
    for numbers in ({}, {"rack": 2, "oversubscription": 4}, {"message": 1000}):
        model = drive("allreduce", ranks=hosts * each, each=each, bytes=size, **numbers)
        assert model["algorithm"] == "hierarchical"
        # Two pieces of 4 MiB, in each of which a rank exchanges a slice and a result with each other host.
        assert model["frames"] == 2 * each * 2 * (hosts - 1)
        piece = 4 << 20
        share = -(-piece // each // hosts // 64) * 64  # of one host in the slice of a rank
        last = piece // each - (hosts - 1) * share
        first_host = 2 * (hosts - 2) * (padded(share) + HEADER) + 2 * HEADER + padded(share) + padded(last)
        assert model["bytes"] == 2 * each * first_host


def test_steps_in_shared_memory_take_the_times_of_their_bytes(benchmarks: Any) -> None:
    drive = benchmarks("common.native").run
    kib, each = 1024, 4
    world_numbers = {"ranks": 2 * each, "each": each, "latency": 0, "gigabits": 1000, "memory": 8000}
    # In a microsecond a rank copies 2,000 bytes, or reads as many to add them up. A slice has 64 KiB, the
    # share of a rank in a chunk: each rank packs three and adds up four, then packs one and copies three.
    one = (3 + 1 + 3 + 4) * 64 * kib / 2000
    found = drive("allreduce", **world_numbers, bytes=256 * kib)["microseconds"]
    assert found == pytest.approx(one, abs=3)  # on the cable
    # On one host a rank packs its tensor, adds up its slice of all, and copies the slices of the others; of
    # two ranks each adds up both tensors, by which it has the result.
    alone = {"each": each, "bytes": kib * kib, "memory": 8000}
    for ranks, speed in ((4, 2000), (2, 4000)):
        found = drive("allreduce", ranks=ranks, **alone)["microseconds"]
        assert found == pytest.approx(3 * kib * kib / speed, abs=1)


def test_late_ranks_and_lost_leaders_are_simulated(benchmarks: Any) -> None:
    simulate = benchmarks("simulate").BENCHMARK
    found = simulate.run(
        ranks=[8, 64, 2048],
        only=["stragglers", "loss"],
        late_by=[6000],
        most_late=64,
        tensors=10,
        rounds=2,
    )
    one_host, many = found["stragglers"]
    assert {rank for rank, *_ in one_host["lateness"]} == {7}
    (late,) = [one for one in many["lateness"] if one[2] > 1000]
    assert late[0] == 63
    assert late[2] == pytest.approx(2000, rel=0.1)  # behind the second last, in microseconds
    losses = {(row["ranks"], row["host"]): row for row in found["loss"]}
    assert [losses[64, host]["announced"] for host in (False, True)] == [7, 56]
    # Over the links of survivors, to 7 ranks of the same host and 7 at the same place of others, both ways.
    assert losses[64, False]["frames"] == 64 * 14 - 2 * 14
    assert losses[64, True]["frames"] == 56 * 13
    assert losses[64, False]["last"] < 200_000 <= losses[64, True]["first"]
    assert 2040 * 9 <= losses[2048, True]["frames"] < 2040 * 10  # 7 and 2, or more in the control tree


def test_a_start_has_the_bytes_and_connections_of_its_world(benchmarks: Any) -> None:
    start = benchmarks("common.simulated_start")
    costs = start.StartCosts(1e-3, 1e-5, 1e-3, 1e-4, 1e9)
    described = start.describe(16, 8)
    place = start.Place(8, 0.0, 1e12)
    two = start.simulate_start(16, place, costs, described)
    # Rank 0 links to the ranks of its host, and to rank 8. Each rank has a link to its leader, and one to the
    # other host. Rank 9 connects to ranks 1 and 8.
    assert two["connections"] == 8
    assert start.first_links(16, 8) == {"most": 8, "all": 2 * 7 + 8, "connects": 2}
    # The eight ranks of the server's host, and the collector of the other one, whose ranks have numbers.
    assert two["sent_by_server"] == sum(9 * size + MESSAGE_HEADER.size + 8 * 4 for size in described.sizes)
    assert two["sent_frames"] == 3 * 9
    assert two["most_held"] == max(described.sizes)
    assert two["phases"]["links"] == pytest.approx(2 * 2e-3 + 7e-3)
    star = start.simulate_start(8, place, costs, described)
    assert star["connections"] == 7
    assert star["phases"]["links"] == pytest.approx(2e-3 + 6e-3)
    assert star["phases"]["memory"] == pytest.approx(3 * 8 * 1e-5)
    assert all(size > 5 * 16 for size in described.sizes[:2])
    assert described.sizes[2] == MESSAGE_HEADER.size + 4 * 16  # empty payloads behind their lengths


@pytest.mark.parametrize(
    ("ranks", "each", "behind", "connections"),
    [(8, 8, [], 8), (24, 8, [8, 8], 10), (5, 2, [2], 4), (4, 1, [], 4)],
)
def test_hosts_of_several_ranks_have_one_connection_to_the_server(
    benchmarks: Any, ranks: int, each: int, behind: list[int], connections: int
) -> None:
    start = benchmarks("common.simulated_start")
    place = start.Place(each, 0.0, 1e12)
    assert start.ranks_behind_collectors(ranks, place) == behind
    assert start.connections_to_server(ranks, place) == connections
    without = replace(place, has_collectors=False)
    assert start.ranks_behind_collectors(ranks, without) == []
    assert start.connections_to_server(ranks, without) == ranks


def test_a_real_rendezvous_sends_the_bytes_of_the_simulated_one(benchmarks: Any) -> None:
    start, rendezvous = benchmarks("common.simulated_start"), benchmarks("rendezvous")
    sizes, place = start.describe(9, 3).sizes, start.Place(3, 0.0, 1e12)
    welcome = MESSAGE_HEADER.size + 16
    collected, direct = (rendezvous.count(3, 3, collectors) for collectors in (True, False))
    assert (collected.connections, direct.connections) == (2, 6)
    own_host = sum(3 * size for size in sizes)  # over a Unix socket
    assert (
        collected.sent
        == 2 * welcome + sum(start.bytes_of_answers(9, place, size) for size in sizes) - own_host
    )
    assert direct.sent == 6 * welcome + sum(6 * size for size in sizes)


def test_costs_of_a_start_are_measured(benchmarks: Any) -> None:
    costs = benchmarks("common.simulated_start").measure_costs()
    assert min(costs.handshake, costs.descriptor, costs.server_join, costs.server_gather, costs.stream) > 0


def test_a_change_goes_on_in_order(benchmarks: Any) -> None:
    found = benchmarks("simulate").BENCHMARK.run(ranks=[8, 32, 64], only=["change"])["change"]
    assert [row["ranks"] for row in found] == [32, 64]  # of at least four hosts
    for row in found:
        assert 0.2 <= row["noticed"] < row["enlisted"] < row["described"] < row["started"]
    # Three lists of all members for each member; workers connect to the rendezvous directly.
    small, large = (row["bytes"] / (row["ranks"] - 8) for row in found)
    assert 3 * 4 * 32 < large - small < 40 * 32
    start = benchmarks("common.simulated_start")
    sizes = start.describe(56, 8).sizes
    assert found[1]["starts_sent"] == sum(56 * size for size in sizes)
