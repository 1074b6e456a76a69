"""sirtaki.run over several hosts, with the real ssh and sshd."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .network import Network

SCRIPT = """
import socket
import sirtaki
import sirtaki.numpy as hvd

def work(data):
    hvd.init()
    total = hvd.allreduce([float(hvd.rank())], op=hvd.Sum)
    if data == b"fail" and hvd.rank() == 2:
        raise ValueError("bad batch")
    return hvd.rank(), socket.gethostname(), float(total[0]), data[:3]

def show(data):
    try:
        print(sirtaki.run(work, (data,), hosts="hosta:1,hostb:1,hostc:1", env={"SIRTAKI_ENCRYPT": "%s"}))
    except ValueError as error:
        print(error, error.__cause__.rank, error.__cause__.host)

show(b"123" * 1_000_000)
show(b"fail")
"""


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_results_and_exceptions_come_from_other_hosts(network: Network, tmp_path: Path, encrypt: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % encrypt)
    code, output, errors = network.hosts[0].run(sys.executable, script)
    assert code == 0, errors
    results = [(rank, f"host{letter}", 3.0, b"123") for rank, letter in enumerate("abc")]
    assert output.splitlines() == [str(results), "bad batch 2 hostc"], errors
