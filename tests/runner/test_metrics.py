"""hvdrun --metrics-port: what Prometheus' own parser reads while a job runs, and what is refused."""

from __future__ import annotations

import errno
import itertools
import json
import re
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launching import Hosts, Run, Script, Start, script_writer, wait_until
from scraping import Samples, ports_in, scrape

from sirtaki.runner.observe.endpoints import parse_address

Observed = Callable[..., tuple[subprocess.Popen[bytes], int]]

# A rank that counts operations, writes what hvd.stats() returns, and goes on when the file "end" exists.
TRAINING = """
import contextlib, json, pathlib, sys, time
import numpy
import sirtaki.numpy as hvd
from sirtaki.bindings.context import current

hvd.init()
folder, rank = pathlib.Path(sys.argv[1]), hvd.rank()
for step in range(20):
    if rank == 1:
        time.sleep(0.03)  # 0.6 s in all: news of lateness arrive twice a second at most
    hvd.allreduce(numpy.ones(1000, numpy.float32), name="gradient")
with contextlib.suppress(hvd.MismatchError):
    hvd.allreduce(numpy.ones(1 + rank), name="different shapes")
{}
(folder / f"{{rank}}.new").write_text(json.dumps(hvd.stats()))
(folder / f"{{rank}}.new").rename(folder / f"stats{{rank}}.json")
while not (folder / "end").exists():
    time.sleep(0.02)
"""

# Steps as an optimizer of an adapter counts them.
STEPS = """
for step in range(4):
    with current().steps.exposed:
        time.sleep(0.01)
    current().steps.end()
"""
# Steps of a program that JAX has compiled; nothing measures their exposed time.
COMPILED_STEPS = """
import jax, jax.numpy, optax
import sirtaki.jax

optimizer = sirtaki.jax.DistributedOptimizer(optax.sgd(0.1))
update = jax.jit(optimizer.update)
parameters = jax.numpy.ones(3)
state = optimizer.init(parameters)
for step in range(4):
    _, state = jax.block_until_ready(update(parameters, state))
"""
SENT = "sirtaki_link_sent_bytes_total"
STEP_METRICS = ("sirtaki_step", "sirtaki_productive", "sirtaki_exposed")


@pytest.fixture
def training(tmp_path: Path) -> Callable[[str], str]:
    return script_writer(tmp_path / "training.py", TRAINING)


def read_stats(folder: Path, ranks: int) -> list[dict]:
    files = [folder / f"stats{rank}.json" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() for file in files), "the ranks have written their statistics")
    return [json.loads(file.read_text()) for file in files]


def expected_durations(name: str, rank: str, durations: dict) -> Samples:
    bounds = [*map(str, durations["bounds"]), "+Inf"]
    counts = dict(zip(bounds, itertools.accumulate(durations["counts"]), strict=True))
    return {
        **{(f"{name}_bucket", f"{bound} {rank}"): count for bound, count in counts.items()},
        (f"{name}_sum", rank): pytest.approx(durations["total_seconds"]),
        (f"{name}_count", rank): sum(durations["counts"]),
    }


def expected_steps(rank: str, steps: dict) -> Samples:
    exposed = {}
    if (seconds := steps["exposed_seconds"]) is not None:
        exposed["sirtaki_exposed_communication_seconds_total", rank] = pytest.approx(seconds)
    return {
        ("sirtaki_steps_total", rank): steps["count"],
        ("sirtaki_productive_seconds_total", rank): pytest.approx(steps["productive_seconds"]),
        **exposed,
        **expected_durations("sirtaki_step_seconds", rank, steps["times"]),
    }


def expected_traffic(rank: str, stats: dict) -> Samples:
    found: Samples = {}
    for row in stats["by_backend"]:
        place = f"{row['backend']} {row['kind']} {rank}"
        numbers = {"ok": row["operations"] - row["failed"], "failed": row["failed"]}
        found |= {("sirtaki_operations_total", f"{place} {status}"): n for status, n in numbers.items() if n}
        if row["bytes"]:
            found["sirtaki_operation_bytes_total", place] = row["bytes"]
    return found


def expected_of(stats: dict) -> Samples:
    """Returns the samples that agree with what hvd.stats() has returned."""
    rank, late = str(stats["rank"]), stats["lateness"][stats["rank"]]
    return {
        ("sirtaki_up", rank): 1,
        **expected_traffic(rank, stats),
        ("sirtaki_plans_total", rank): stats["plans"],
        ("sirtaki_cache_hits_total", rank): stats["cache_hits"],
        ("sirtaki_cache_misses_total", rank): stats["cache_misses"],
        ("sirtaki_waiting_seconds_total", rank): pytest.approx(stats["waiting_seconds"]),
        ("sirtaki_moving_seconds_total", rank): pytest.approx(stats["moving_seconds"]),
        ("sirtaki_stalls_total", rank): stats["stalls"],
        **expected_durations("sirtaki_operation_wait_seconds", rank, stats["wait"]),
        **expected_durations("sirtaki_operation_transfer_seconds", rank, stats["transfer"]),
        ("sirtaki_world_size", ""): stats["size"],
        ("sirtaki_generation", ""): 1,
        ("sirtaki_last_arrivals_total", rank): late["times"],
        ("sirtaki_lateness_seconds_count", rank): late["times"],
        ("sirtaki_lateness_seconds_sum", rank): pytest.approx(late["times"] * late["mean_seconds"]),
    }


def scraped_once(port: int, expected: Samples) -> Samples:
    """Returns all samples, once the endpoint has the expected ones, which agree with hvd.stats()."""
    found: Samples = {}

    def agrees() -> bool:
        found.clear()
        found.update(scrape(port))
        return all(found.get(key) == value for key, value in expected.items())

    wait_until(agrees, "the endpoint has the counters of hvd.stats()")
    return found


@pytest.fixture
def observed(start_hvdrun: Start, training: Script, tmp_path: Path) -> Observed:
    """Returns a function that starts a training with metrics; it returns the job and the port."""

    def start(ranks: int, body: str = "") -> tuple[subprocess.Popen[bytes], int]:
        options = ("-np", str(ranks), "--metrics-port", "0")
        with (tmp_path / "errors").open("wb") as errors:
            job = start_hvdrun(*options, "python", training(body), str(tmp_path), stderr=errors)
        (port,) = ports_in(tmp_path / "errors")
        return job, port

    return start


def test_counters_agree_with_those_of_the_ranks_while_a_job_runs(observed: Observed, tmp_path: Path) -> None:
    job, port = observed(2)
    expected, sent = {}, {}
    for stats in read_stats(tmp_path, 2):
        expected |= expected_of(stats)
        for row in stats["sent"]:
            sent[SENT, f"{row['peer_host']} {stats['rank']} {row['transport']}"] = row["bytes"]
        assert (stats["operations"], stats["failed"]) == (21, 1)
        assert stats["lateness"][1]["times"] > 0
    found = scraped_once(port, expected)
    for rank in ("0", "1"):
        assert found["process_resident_memory_bytes", rank] > 1 << 20
        assert found["process_cpu_seconds_total", rank] > 0
    assert not any("gradient" in labels for _, labels in found)  # no tensor is named
    for key, number in sent.items():  # control messages may have followed
        assert found[key] >= number > 0
    for rank in ("0", "1"):
        assert found["sirtaki_operations_total", f"shared memory all-reduce {rank} ok"] == 20
        assert found["sirtaki_operations_total", f"none all-reduce {rank} failed"] == 1
        assert found["sirtaki_operation_bytes_total", f"shared memory all-reduce {rank}"] == 20 * 4000
    assert not any(name.startswith(STEP_METRICS) for name, _ in found)  # there is no optimizer
    (tmp_path / "end").touch()
    assert job.wait() == 0, (tmp_path / "errors").read_text()
    assert scrape(port) == {}  # nothing is left behind


@pytest.mark.parametrize("steps", [STEPS, COMPILED_STEPS], ids=["python", "jit"])
def test_steps_agree_with_those_of_the_ranks(observed: Observed, tmp_path: Path, steps: str) -> None:
    if steps == COMPILED_STEPS:
        pytest.importorskip("optax")
    job, port = observed(1, steps)
    (stats,) = read_stats(tmp_path, 1)
    expected = expected_steps("0", stats["steps"])
    assert (stats["steps"]["count"], sum(stats["steps"]["times"]["counts"])) == (4, 3)
    found = scraped_once(port, expected)
    assert {key for key in found if key[0].startswith(STEP_METRICS)} <= expected.keys()
    (tmp_path / "end").touch()
    assert job.wait() == 0


def test_a_rank_may_wait_for_gradients_without_steps(observed: Observed, tmp_path: Path) -> None:
    job, port = observed(1, "with current().steps.exposed:\n    time.sleep(0.01)")
    (stats,) = read_stats(tmp_path, 1)
    assert stats["steps"]["count"] == 0
    key = ("sirtaki_exposed_communication_seconds_total", "0")
    found = scraped_once(port, {key: pytest.approx(stats["steps"]["exposed_seconds"])})
    assert {one for one in found if one[0].startswith(STEP_METRICS)} == {key}
    (tmp_path / "end").touch()
    assert job.wait() == 0


@pytest.mark.parametrize("end", ["sys.exit()", "hvd.shutdown(); time.sleep(3600)"])
def test_a_rank_that_has_left_is_not_up(observed: Observed, tmp_path: Path, end: str) -> None:
    job, port = observed(2, f"if rank == 1: {end}")
    is_running = "sleep" in end

    def has_left() -> bool:
        found = scrape(port)
        ups = [found.get(("sirtaki_up", rank)) for rank in ("0", "1")]
        # A process that exits leaves its world before it ends.
        return ups == [1, 0] and (("process_open_fds", "1") in found) == is_running

    wait_until(has_left, "rank 1 is not up")
    job.terminate()
    job.wait()


def test_kill_9_of_hvdrun_leaves_no_endpoint(observed: Observed) -> None:
    job, port = observed(1)
    wait_until(lambda: scrape(port), "the endpoint answers")
    job.kill()

    def refuses() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED

    wait_until(refuses, "the endpoint has ended")


def test_clients_that_say_nothing_keep_nobody_out(observed: Observed, tmp_path: Path) -> None:
    job, port = observed(1)
    wait_until(lambda: scrape(port), "the endpoint answers")
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
    assert scrape(port)
    for connection in idle:
        connection.close()
    (tmp_path / "end").touch()
    assert job.wait() == 0


def test_a_name_of_somebody_elses_gets_no_metrics(observed: Observed, tmp_path: Path) -> None:
    """A web page can have its own name mean this machine, and would read what the port answers."""
    job, port = observed(1)
    wait_until(lambda: scrape(port), "the endpoint answers")
    for host, code in (("evil.example", 403), (f"evil.example:{port}", 403), (f"LOCALHOST:{port}", 200)):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
        try:
            found = urllib.request.urlopen(request, timeout=60).status
        except urllib.error.HTTPError as error:
            found = error.code
        assert (host, found) == (host, code)
    (tmp_path / "end").touch()
    assert job.wait() == 0


def test_a_request_that_cannot_be_read_is_answered_without_a_traceback(
    observed: Observed, tmp_path: Path
) -> None:
    job, port = observed(1)
    wait_until(lambda: scrape(port), "the endpoint answers")
    headers = {"Accept": "application/openmetrics-text;version=abc"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=60)
    (tmp_path / "end").touch()
    assert job.wait() == 0
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_a_port_in_use_is_an_error_before_ranks_start(hvdrun: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = hvdrun("-np", "2", "--metrics-port", str(port), "echo", "started")
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"--metrics-port: cannot listen at port {port} of 127.0.0.1 on " in result.stderr
    assert "Address already in use. Choose another port" in result.stderr


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    hvdrun: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    hidden = "import sys; sys.modules['prometheus_client'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    environment["PYTHONPATH"] = str(tmp_path)
    result = hvdrun("-np", "2", "--metrics-port", "0", "echo", "started")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "--metrics-port needs the package prometheus_client on " in result.stderr
    assert "pip install 'sirtaki[metrics]'" in result.stderr


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":0", ("127.0.0.1", 0)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_the_address_is_the_loopback_one_unless_one_is_given(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("address", ["70000", "host:", "here:http", "-1"])
def test_an_address_without_a_port_is_refused(hvdrun: Run, address: str) -> None:
    result = hvdrun("-np", "2", f"--metrics-port={address}", "echo", "started")
    assert result.returncode != 0
    assert f"it takes a port from 0 to 65535, or HOST:PORT, not '{address}'" in result.stderr


def test_an_address_that_others_reach_comes_with_a_warning(hvdrun: Run) -> None:
    result = hvdrun("-np", "1", "--metrics-port", "0.0.0.0:0", "echo", "started")
    assert result.returncode == 0, result.stderr
    pattern = r"http://0\.0\.0\.0:\d+/metrics \(neither encrypted nor protected by a password\)"
    assert re.search(pattern, result.stderr)


def test_no_state_is_written_without_the_option(hvdrun: Run) -> None:
    show = (
        "import os, pathlib, sirtaki.numpy as hvd; hvd.init(); hvd.barrier(); "
        "print((pathlib.Path(os.environ['SIRTAKI_KEY_FILE']).parent / 'states').exists())"
    )
    assert "False" in hvdrun("-np", "1", "python", "-c", show).stdout
    assert "True" in hvdrun("-np", "1", "--metrics-port", "0", "python", "-c", show).stdout


def test_each_host_serves_its_own_ranks(
    start_hvdrun: Start, training: Script, hosts: Hosts, tmp_path: Path
) -> None:
    hosts(hostB={})
    arguments = ("-H", "localhost:1,hostB:1", "--metrics-port", "0", "python", training(""), str(tmp_path))
    errors = tmp_path / "errors"
    with errors.open("wb") as file:
        job = start_hvdrun(*arguments, stderr=file)
        read_stats(tmp_path, 2)

    def ranks_up() -> list[str]:
        return sorted(rank for port in ports for name, rank in scrape(port) if name == "sirtaki_up")

    ports = ports_in(errors, 2)
    wait_until(lambda: ranks_up() == ["0", "1"], "each endpoint has one rank")
    (tmp_path / "end").touch()
    assert job.wait() == 0, errors.read_text()
    assert "the process that serves" not in errors.read_text(), "the servers end with the job"


def test_the_end_of_the_server_of_another_host_is_told(
    start_hvdrun: Start, training: Script, hosts: Hosts, tmp_path: Path
) -> None:
    hosts(hostB={})
    arguments = ("-H", "hostB:1", "--metrics-port", "0", "python", training(""), str(tmp_path))
    errors = tmp_path / "errors"
    with errors.open("wb") as file:
        job = start_hvdrun(*arguments, stderr=file)
        read_stats(tmp_path, 1)
    (server,) = (
        one
        for one in psutil.Process(job.pid).children(recursive=True)
        if "sirtaki.runner.metrics.server" in one.cmdline()
    )
    server.kill()
    notice = f"the process that serves the metrics of this host (pid {server.pid}) was killed by signal 9"
    wait_until(lambda: notice in errors.read_text(), "hvdrun shows what the agent has told")
    assert f"[hostB] {notice}" in errors.read_text()
    (tmp_path / "end").touch()
    assert job.wait() == 0, errors.read_text()


def test_a_port_in_use_on_another_host_is_an_error_before_ranks_start(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = hvdrun("-H", "hostB:2", "--metrics-port", str(port), "echo", "started")
    assert result.returncode == 1
    assert result.stdout == ""
    text = f"hvdrun: hostB cannot serve metrics: --metrics-port: cannot listen at port {port} of 127.0.0.1"
    assert text in result.stderr


def test_the_port_may_be_in_a_file_of_options(hvdrun: Run, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("metrics-port: 0\n")
    result = hvdrun("-np", "1", "--config-file", str(tmp_path / "options.yaml"), "echo", "started")
    assert result.returncode == 0, result.stderr
    assert "/metrics" in result.stderr
