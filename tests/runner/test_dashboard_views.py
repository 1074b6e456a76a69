"""The views of the page beside the ranks: the slowest tensors, and the links between hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dashboards import snapshot
from rank_samples import METRICS, NOW, sample, state_values

from sirtaki.runner.dashboard.feed import MOST_LINKS, MOST_TENSORS, links_of, tensors_of
from sirtaki.runner.observe.remote_states import answers
from sirtaki.runner.observe.state_shape import RankSample
from sirtaki.runner.top.snapshot import Snapshot, from_line


def cells_of(view: dict[str, Any]) -> list[list[str]]:
    return [row["cells"] for row in view["rows"]]


def names_of(view: dict[str, Any]) -> list[str]:
    return [column["name"] for column in view["columns"]]


def sent(peer: str, number: int, transport: str = "tcp") -> dict[str, Any]:
    return {"peer_host": peer, "transport": transport, "bytes": number}


def looks(*senders: tuple[str, list[dict[str, Any]], list[dict[str, Any]]]) -> tuple[Snapshot, Snapshot]:
    """Returns two snapshots, 2 s apart, of ranks with a host and what they had sent at both."""
    before = [sample(rank, host=host, sent=old) for rank, (host, old, _) in enumerate(senders)]
    now = [sample(rank, host=host, time=NOW + 2, sent=new) for rank, (host, _, new) in enumerate(senders)]
    return snapshot(0, *before), snapshot(2, *now)


def test_the_tensors_with_the_longest_exposed_time_come_first() -> None:
    ranks = (
        sample(0, tensors=[["loss", 10, 0.1, 0.9, 0.1], ["weight", 10, 0.5, 0.2, 0.3]]),
        sample(1, tensors=[["weight", 30, 0.3, 0.2, 0.1], ["bias", 1, 0.001, 0.0, 0.0]]),
    )
    view = tensors_of(snapshot(0, *ranks))
    assert names_of(view) == ["tensor", "operations", "exposed", "wait", "transfer"]
    assert cells_of(view) == [
        ["weight", "20", "20.0", "10.0", "10.0"],
        ["loss", "10", "10.0", "90.0", "10.0"],
        ["bias", "1", "1.00", "0", "0"],
    ]
    assert [row["share"] for row in view["rows"]] == [1.0, 0.25, 0.003]  # 0.4, 0.1 and 0.001 s a rank
    assert [column["is_number"] for column in view["columns"]] == [False, True, True, True, True]


def test_without_exposed_times_the_wait_decides() -> None:
    view = tensors_of(snapshot(0, sample(tensors=[["a", 2, None, 0.1, 0.9], ["b", 2, None, 0.2, 0.1]])))
    assert names_of(view) == ["tensor", "operations", "wait", "transfer"]
    assert cells_of(view) == [["b", "2", "100", "50.0"], ["a", "2", "50.0", "450"]]


def test_a_view_has_few_rows_and_those_of_ranks_that_are_up() -> None:
    many = [[f"t{number}", 1, 0.1, 0.1, 0.1] for number in range(10)]
    other = [[f"u{number}", 1, 0.1, 0.1, 0.1] for number in range(10)]
    assert (
        len(cells_of(tensors_of(snapshot(0, sample(tensors=many), sample(1, tensors=other))))) == MOST_TENSORS
    )
    assert cells_of(tensors_of(snapshot(0, sample(tensors=many, is_up=False)))) == []
    hosts = [f"host{number}" for number in range(30)]
    view = links_of(*looks(("hostX", [sent(one, 0) for one in hosts], [sent(one, 9) for one in hosts])))
    assert len(cells_of(view)) == MOST_LINKS


def test_links_add_up_the_ranks_of_a_host() -> None:
    view = links_of(
        *looks(
            ("hostA", [sent("hostB", 100)], [sent("hostB", 100 + (2 << 20))]),
            ("hostA", [sent("hostB", 0)], [sent("hostB", 2 << 20)]),
            ("hostB", [sent("hostA", 5, "tls")], [sent("hostA", 5 + (1 << 20), "tls")]),
        )
    )
    assert names_of(view) == ["link", "transport", "data/s"]
    assert cells_of(view) == [
        ["hostA → hostB", "tcp", "2.0 MiB"],
        ["hostB → hostA", "tls", "512 KiB"],
    ]
    assert [row["share"] for row in view["rows"]] == [1.0, 0.25]


def test_a_link_without_a_rate_is_left_out() -> None:
    assert cells_of(links_of(None, snapshot(0, sample(sent=[sent("hostB", 100)])))) == []
    new = ("hostA", [], [sent("hostB", 100)])
    less = ("hostA", [sent("hostB", 100)], [sent("hostB", 10)])  # a new generation
    control = ("hostA", [sent("hostA", 0, "ring")], [sent("hostA", 100, "ring")])
    for sender in (new, less, control):
        assert cells_of(links_of(*looks(sender))) == []


def test_a_state_from_another_host_has_its_busiest_links_and_no_metrics(tmp_path: Path) -> None:
    rows = [sent(f"host{number}", number) for number in range(20)]
    values = state_values(0, os.getpid(), sent=rows)
    (tmp_path / "1.json").write_text(json.dumps(values))
    (frame,) = answers(tmp_path, 1)
    found = frame.values["values"]
    assert [row["bytes"] for row in found["sent"]] == [19, 18, 17, 16, 15, 14, 13, 12]
    assert METRICS.keys() <= values.keys()
    assert not METRICS.keys() & found.keys()
    assert RankSample.__dataclass_fields__.keys() - found.keys() == {
        *("is_up", "is_stopped", "begin", "cpu_seconds", "memory_bytes")
    }


def test_a_record_without_the_views_can_be_read() -> None:
    line = json.loads(snapshot(0, sample(sent=[sent("hostB", 1)])).as_line())
    for rank in line["ranks"]:
        del rank["sent"], rank["tensors"]
    (rank,) = from_line(json.dumps(line)).ranks
    assert (rank.sent, rank.tensors) == ([], [])
