"""Reads a job's metrics as Prometheus does."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

from launching import wait_until
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str], float]  # by name, and the labels except the host, such as "0" or "0 ok"


def ports_in(output: Path, count: int = 1) -> list[int]:
    """Returns the ports of as many endpoints as hvdrun and its agents name in a file."""

    def found() -> list[int]:
        text = output.read_text() if output.exists() else ""
        return [int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)/metrics", text)]

    wait_until(lambda: len(found()) == count, f"{count} endpoints are named")
    return found()


def scrape(port: int) -> Samples:
    """Returns the samples of an endpoint; none before it answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return {}
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = " ".join(value for name, value in sorted(sample.labels.items()) if name != "host")
            found[sample.name, labels] = sample.value
    return found
