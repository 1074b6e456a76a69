"""The page about observing: it names metrics that a host serves."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rank_samples import state_values, stepped

from sirtaki.runner.metrics.server import RankSamples

from .pages import DOCS, path_of

EXAMPLES = DOCS.parent / "examples" / "prometheus"
NAME = re.compile(r"\b(?:sirtaki|process)_[a-z_]+")
KIND = {"kind": "all-reduce", "algorithm": ""}
VALUES = state_values(
    rank=0,
    pid=os.getpid(),
    by_backend=[
        {**KIND, "backend": "links", "operations": 1, "failed": 0, "bytes": 4},
        {**KIND, "backend": "none", "operations": 1, "failed": 1, "bytes": 0},
    ],
    steps=stepped(2, 0.05, exposed_seconds=0.01),
    sent=[{"peer_host": "hostB", "transport": "tcp", "bytes": 100}],
)


def served_names(folder: Path) -> tuple[set[str], set[str]]:
    """Returns the names of the families of a host with one rank, and those of its samples."""
    (folder / "1.json").write_text(json.dumps(VALUES))
    registry = CollectorRegistry()
    registry.register(RankSamples(folder))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    totals = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    return totals, {sample.name for family in families for sample in family.samples}


def test_the_metrics_of_the_page_exist(tmp_path: Path) -> None:
    families, samples = served_names(tmp_path)
    named = set(NAME.findall(path_of("observing.md").read_text()))
    assert len(named) > 10
    assert named <= families | samples


def test_alerts_and_the_dashboard_use_metrics_that_exist(tmp_path: Path) -> None:
    _, samples = served_names(tmp_path)
    (group,) = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    alerts = [rule["expr"] for rule in group["rules"]]
    panels = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(alerts) == 5
    assert len(shown) == len(panels) > 10
    for expression in (*alerts, *shown):
        names = set(NAME.findall(expression))
        assert names
        assert names <= samples, expression
    assert all({"summary", "remedy"} <= set(rule["annotations"]) for rule in group["rules"])
