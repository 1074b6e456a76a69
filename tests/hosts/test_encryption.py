"""Encryption by hvdrun --encrypt over two hosts: the bytes between them, and rejected peers."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, wait_until

from .network import Host, Network, finish, places, python

SNIFF = Path(__file__).with_name("sniff.py")
TENSOR = b"the weights of nobody else "  # repeated in the tensor's bytes
WORDS = "an object that is pickled"

TRAINING = """
import os, sys
import numpy as np, sirtaki.numpy as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
secret = np.frombuffer(TENSOR * 1000, np.uint8).copy()
assert (hvd.broadcast(secret if rank == 0 else np.zeros_like(secret), 0) == secret).all()
assert hvd.allgather_object((rank, WORDS)) == [(other, WORDS) for other in range(size)]
for kind in (np.float32, np.float64, np.int32, np.int64, np.float16):
    for count in (1, 1000, 300_001):
        mine = (np.arange(count) % 11 + rank).astype(kind)
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert (total == ((np.arange(count) % 11) * size + size * (size - 1) // 2).astype(kind)).all(), kind
print("right", hvd.cross_size())
"""


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(text.replace("TENSOR", repr(TENSOR)).replace("WORDS", repr(WORDS)))
    return path


def hvdrun(network: Network, hosts: str, *arguments: str | Path) -> tuple[int, str, str]:
    return network.hosts[0].run(sys.executable, "-m", "sirtaki.runner", "-H", hosts, *arguments)


class Sniffer:
    """A recorder of all packets of a host's interface."""

    def __init__(self, host: Host, file: Path) -> None:
        self._file = file
        self._process = host.start(sys.executable, SNIFF, host.interface, file)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "listening\n", finish([self._process])

    def end(self, behind: bytes) -> bytes:
        """Returns the recorded packets, once `behind` has passed."""
        wait_until(lambda: behind in self._file.read_bytes(), f"{behind!r} has passed")
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(FAILSAFE_SECONDS)
        return self._file.read_bytes()


SAY = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"that was all", (sys.argv[1], 9))
"""


@pytest.mark.parametrize(
    "options", [[], ["--encrypt", "--sockets-per-link", "2"]], ids=["plain", "encrypted"]
)
def test_what_passes_between_the_hosts(network: Network, tmp_path: Path, options: list[str]) -> None:
    """Sums are exact with and without encryption; the tensors' bytes are visible only without it."""
    sniffer = Sniffer(network.hosts[1], tmp_path / "seen")
    program = script(tmp_path, TRAINING)
    code, output, errors = hvdrun(network, "hosta:2,hostb:2", *options, sys.executable, program)
    assert code == 0, errors
    assert sorted(output.splitlines()) == [f"[{rank}] right 2" for rank in range(4)]
    network.hosts[1].run(sys.executable, "-c", SAY, network.hosts[0].address)
    seen = sniffer.end(behind=b"that was all")
    for words in (TENSOR, WORDS.encode(), b'"settings"'):
        assert (words in seen) == (not options), words


BREAKING = """
import os, sys
PREPARATION
import numpy as np, sirtaki.numpy as hvd
hvd.init()
"""
LOST = """
import os
import numpy as np, sirtaki.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(1000), name="gradient")
if hvd.rank() == 1:
    os.kill(os.getpid(), 9)
try:
    hvd.allreduce(np.ones(1000), name="gradient")
except hvd.HorovodInternalError as error:
    print(type(error).__name__, error)
"""
PLAIN_ON_ONE = """
if os.environ["SIRTAKI_RANK"] == "1":
    os.environ["SIRTAKI_ENCRYPT"] = "0"
"""
NO_OPENSSL_ON_ONE = """
if os.environ["SIRTAKI_RANK"] == "1":
    from sirtaki.bindings.bootstrap.connection import encryption
    encryption._library = "libssl-of-nobody.so"
"""


@pytest.mark.parametrize(
    ("preparation", "expected"),
    [
        (PLAIN_ON_ONE, ["the setting encrypt is 1 on the rendezvous and 0 on rank 1", "SIRTAKI_ENCRYPT"]),
        (
            NO_OPENSSL_ON_ONE,
            ["rank 1 on hostb could not start", "libssl-of-nobody.so was not found", "apt install"],
        ),
    ],
    ids=["plain", "without OpenSSL"],
)
def test_what_goes_wrong_is_said_of_the_rank_concerned(
    network: Network, tmp_path: Path, preparation: str, expected: list[str]
) -> None:
    program = script(tmp_path, BREAKING.replace("PREPARATION", preparation))
    code, _, errors = hvdrun(network, "hosta:1,hostb:1", "--encrypt", sys.executable, program)
    assert code != 0
    for words in expected:
        assert words in errors, errors


def test_a_stream_that_is_cut_is_a_lost_rank(network: Network, key_file: Path) -> None:
    hosts = places(network.hosts[:2], 1, f"{network.hosts[0].address}:29480", key_file)
    ranks = [host.start(*python(LOST), **variables, SIRTAKI_ENCRYPT="1") for host, variables in hosts]
    (code, output, errors), (killed, *_) = finish(ranks)
    assert (code, killed) == (0, -signal.SIGKILL), errors
    assert re.match(r"PeerLostError 'gradient': rank 1 \(pid \d+ on hostb\) was lost", output), output


def test_the_setting_may_come_from_the_environment(network: Network, tmp_path: Path) -> None:
    program = script(tmp_path, TRAINING)
    command = [sys.executable, "-m", "sirtaki.runner", "-H", "hosta:1,hostb:1", sys.executable, str(program)]
    code, output, errors = network.hosts[0].run(*command, SIRTAKI_ENCRYPT="1")
    assert code == 0, errors
    assert sorted(output.splitlines()) == [f"[{rank}] right 2" for rank in range(2)]
