"""Reads a job's metrics as Prometheus does."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str], float]  # by name, and the labels except the host, such as "0" or "0 ok"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
