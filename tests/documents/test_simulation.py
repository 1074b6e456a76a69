"""The simulator of many ranks: real processes send the bytes that simulated ranks send, and counts follow
from the structure of the world."""

from __future__ import annotations

import importlib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEADER = 16  # bytes of a frame
CONTROL = 112  # bytes of the Decision about one known all-reduce


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports modules of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def padded(body: int) -> int:
    return (body + 15) // 16 * 16


@pytest.mark.parametrize("ranks", [3, 4])
def test_real_ranks_send_the_bytes_of_simulated_negotiations(benchmarks: Any, ranks: int) -> None:
    drive = benchmarks("common.simulated").run
    real = drive("many_ranks", ranks=ranks, each=1, barriers=5, steps=3)
    found = drive("negotiation", ranks=ranks, each=1, barriers=1, tensors=5, steps=3)
    assert real["sent"] == found["first"]["bytes_out"] + 3 * found["steady"]["bytes_out"]
    assert found["steady"]["frames_of_all"] == 2 * (ranks - 1)
    beside = drive("many_ranks", ranks=ranks, each=1, barriers=5, steps=3, worlds=2)
    assert beside["sent"] == real["sent"]


@pytest.mark.parametrize(("ranks", "each", "size"), [(4, 1, 4_000_000), (2, 1, 1024), (4, 2, 102_400)])
def test_real_ranks_send_the_bytes_of_simulated_allreduces(
    benchmarks: Any, ranks: int, each: int, size: int
) -> None:
    drive = benchmarks("common.simulated").run
    few, more = (
        drive("many_ranks", ranks=ranks, each=each, bytes=size, steps=steps)["sent"] for steps in (2, 3)
    )
    events, model = (drive("allreduce", ranks=ranks, each=each, bytes=size, events=on) for on in (1, 0))
    assert (events["frames"], events["bytes"]) == (model["frames"], model["bytes"])
    assert more - few == events["bytes"] // each + (ranks // each - 1) * CONTROL


def test_the_model_of_an_allreduce_has_the_frames_of_its_operations(benchmarks: Any) -> None:
    drive = benchmarks("common.simulated").run
    size, hosts, each = 8 << 20, 6, 4
    for numbers in (
        {},
        {"rack": 2, "oversubscription": 4},
        {"message": 1000, "stream": 4000, "processors": 2},
    ):
        world = {"ranks": hosts * each, "each": each, "bytes": size, **numbers}
        events, model = (drive("allreduce", **world, events=on) for on in (1, 0))
        assert events["algorithm"] == model["algorithm"] == "hierarchical"
        assert (events["frames"], events["bytes"]) == (model["frames"], model["bytes"])
    # Two pieces of 4 MiB, in each of which a rank exchanges a slice and a result with each other host.
    assert model["frames"] == 2 * each * 2 * (hosts - 1)
    piece = 4 << 20
    share = -(-piece // each // hosts // 64) * 64  # of one host in the slice of a rank
    last = piece // each - (hosts - 1) * share
    first_host = 2 * (hosts - 2) * (padded(share) + HEADER) + 2 * HEADER + padded(share) + padded(last)
    assert model["bytes"] == 2 * each * first_host


def test_steps_in_shared_memory_take_the_times_of_their_bytes(benchmarks: Any) -> None:
    drive = benchmarks("common.simulated").run
    kib, each = 1024, 4
    world = {"ranks": 2 * each, "each": each, "latency": 0, "gigabits": 1000, "memory": 8000, "sums": 16_000}
    # In a microsecond a rank copies 2,000 bytes, and reads 4,000 to add them up. A slice has 64 KiB, the
    # share of a rank in a chunk: each rank packs three and adds up four, then packs one and copies three.
    one = (3 + 1 + 3) * 64 * kib / 2000 + 4 * 64 * kib / 4000
    for events in (0, 1):
        found = drive("allreduce", **world, bytes=256 * kib, events=events)["microseconds"]
        assert found == pytest.approx(one, abs=3)  # on the cable
    # On two processors, each of which copies as fast, four ranks take turns, and look while they wait.
    shared = {**world, "processors": 2, "memory": 4000, "sums": 8000, "look": 1000}
    found = drive("allreduce", **shared, bytes=256 * kib, events=1)["microseconds"]
    assert 4 * one < found < 4 * one + 40
    patient = drive("allreduce", **{**shared, "look": 5000}, bytes=256 * kib, events=1)["microseconds"]
    assert found < patient < 4 * one + 200
    # On one host a rank packs its tensor, adds up its slice of all, and copies the slices of the others; of
    # two ranks each adds up both tensors, by which it has the result.
    alone = {"each": each, "bytes": kib * kib, "memory": 8000, "sums": 16_000}
    sliced, whole = 2 * kib * kib / 2000 + kib * kib / 4000, kib * kib / 4000 + 2 * kib * kib / 8000
    for events in (0, 1):
        assert drive("allreduce", ranks=4, **alone, events=events)["microseconds"] == pytest.approx(
            sliced, abs=1
        )
        assert drive("allreduce", ranks=2, **alone, events=events)["microseconds"] == pytest.approx(
            whole, abs=1
        )
    crowded = {**alone, "processors": 2, "memory": 4000, "sums": 8000, "look": 1000}
    one = drive("allreduce", ranks=4, **crowded, events=1)["microseconds"]
    smaller = drive("allreduce", ranks=4, **crowded, events=1, chunk=16 * kib)["microseconds"]
    assert 2 * sliced < one < smaller < 2 * sliced + 1000  # more steps, before each of which a rank looks
    # The last slice is smaller than a chunk, the others are larger; and slices without a byte.
    for size in (4 * 256 * kib + 64, 64):
        uneven, model = (drive("allreduce", **world, bytes=size, events=on)["microseconds"] for on in (1, 0))
        assert uneven == pytest.approx(model, rel=0.1, abs=3)


def test_a_machine_tells_what_simulated_ranks_cost(benchmarks: Any) -> None:
    for processes in (2, 16):
        (found,) = benchmarks("common.native").run("calibrate", f"processes={processes}")
        assert min(found["look"], found["message"], found["stream"]) > 0
    memory = benchmarks("common.simulated").run("memory_speed", ranks=4, each=2, bytes=1 << 20)
    assert memory["chunk"] >= 128 << 10
    assert min(memory["memory"], memory["sums"]) > 0


def test_worlds_side_by_side_stand_for_a_larger_one(benchmarks: Any) -> None:
    side_by_side, options = benchmarks("common.checked").SideBySide, Namespace
    halves = side_by_side.of(16, options(beside=2, usable=4, each=8))
    assert halves == side_by_side(ranks=8, each=4, count=2, processors=4)
    assert (halves.a_world, halves.turns, halves.crowd) == (2, 1, 4)
    hosts = side_by_side.of(16, options(beside=8, usable=4, each=8))
    assert hosts == side_by_side(ranks=2, each=1, count=8, processors=4)
    assert (hosts.a_world, hosts.turns, hosts.crowd) == (1, 2, 4)
    few = side_by_side.of(4, options(beside=8, usable=4, each=8))
    assert few.ranks == 2  # one rank has nobody to wait for
    # Eight worlds of 3 microseconds take 6 on four processors, and 10 in reality: 4, of which 4 ranks share.
    assert hosts.unexplained(10, 3) == 1
    assert hosts.unexplained(5, 3) == 0


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
    assert {rank for rank, *_ in one_host.late} == {7}
    (late,) = [one for one in many.late if one[2] > 1000]
    assert late[0] == 63
    assert late[2] == pytest.approx(2000, rel=0.1)  # behind the second last, in microseconds
    losses = {(row.ranks, row.host): row for row in found["loss"]}
    assert [losses[64, host].announced for host in (False, True)] == [7, 56]
    # Over the links of survivors, to 7 ranks of the same host and 7 at the same place of others, both ways.
    assert losses[64, False].frames == 64 * 14 - 2 * 14
    assert losses[64, True].frames == 56 * 13
    assert losses[64, False].last < 200_000 <= losses[64, True].first
    assert 2040 * 9 <= losses[2048, True].frames < 2040 * 10  # 7 and 2, or more in the control tree


def test_a_start_has_the_bytes_and_connections_of_its_world(benchmarks: Any) -> None:
    start = benchmarks("common.simulated_start")
    costs = start.StartCosts(1e-3, 1e-5, 1e-3, 1e-4, 1e9, 0.5)
    described = start.describe(16, 8)
    place = start.Place(8, 0.0, 1e12)
    two = start.simulate_start(16, place, costs, described)
    # Rank 0 links to the ranks of its host, and to rank 8. Each rank has a link to its leader, and one to the
    # other host. Rank 9 connects to ranks 1 and 8.
    assert two.connections == 8
    assert start.Links.of(16, 8) == start.Links(8, 2 * 7 + 8, 2)
    # The eight ranks of the server's host, and the collector of the other one, whose ranks have numbers.
    assert two.sent_by_server == sum(9 * (4 + size) + 1 + 4 + 8 * 4 for size in described.sizes)
    assert two.sent_frames == 3 * 9
    assert two.most_held == max(described.sizes)
    assert two.phases["links"] == pytest.approx(2 * 2e-3 + 7e-3)
    star = start.simulate_start(8, place, costs, described)
    assert star.connections == 7
    assert star.phases["links"] == pytest.approx(2e-3 + 6e-3)
    assert star.phases["memory"] == pytest.approx(3 * 8 * 1e-5)
    shared = start.simulate_start(16, start.Place(8, 0.0, 1e12, 2), costs, described)
    assert shared.phases["links"] == pytest.approx(22 * 2e-3 / 2)
    assert shared.phases["start"] == pytest.approx(8 * 0.5)
    assert all(size > 5 * 16 for size in described.sizes[:2])
    assert described.sizes[2] == 1 + 4 * 16  # empty payloads behind their lengths


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
    welcome = 4 + 1 + 16
    collected, direct = (rendezvous.count(3, 3, collectors) for collectors in (True, False))
    assert (collected.connections, direct.connections) == (2, 6)
    own_host = sum(3 * (4 + size) for size in sizes)  # over a Unix socket
    assert (
        collected.sent
        == 2 * welcome + sum(start.bytes_of_answers(9, place, size) for size in sizes) - own_host
    )
    assert direct.sent == 6 * welcome + sum(6 * (4 + size) for size in sizes)


def test_costs_of_a_start_are_measured(benchmarks: Any) -> None:
    costs = benchmarks("common.simulated_start").measure_costs(1e9)
    assert min(costs.handshake, costs.descriptor, costs.server_join, costs.server_gather) > 0


def test_a_change_goes_on_in_order(benchmarks: Any) -> None:
    found = benchmarks("simulate").BENCHMARK.run(ranks=[8, 32, 64], only=["change"])["change"]
    assert [row.ranks for row in found] == [32, 64]  # of at least four hosts
    for row in found:
        assert 0.2 <= row.noticed < row.enlisted < row.described < row.started
    # Three lists of all members for each member; workers connect to the rendezvous directly.
    small, large = (row.bytes / (row.ranks - 8) for row in found)
    assert 3 * 4 * 32 < large - small < 40 * 32
    start = benchmarks("common.simulated_start")
    sizes = start.describe(56, 8).sizes
    assert found[1].starts_sent == sum(56 * (4 + size) for size in sizes)
