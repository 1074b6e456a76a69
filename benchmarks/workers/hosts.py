"""A rank of benchmarks/hosts.py: one implementation of all-reduce, or the plain stream as its baseline.

Usage: python -m workers.hosts SOCKET sirtaki|gloo|mpi|stream
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from pathlib import Path

import numpy as np
from common.collectives import Array, Call
from common.peers import OpenMPI, Peer, Sirtaki, TorchDistributed
from common.serving import serve

from workers.collectives import Rank

PIECE = 1 << 20  # of one write or read
FIRST_PORT = 30_500


class Stream(Peer):
    """A plain stream, to measure the links: sends as many bytes to the next rank as it receives from the
    previous rank, with one thread for each direction. It is no all-reduce, so it has no result.
    """

    version = "one TCP stream each way, a thread a direction, writes of 1 MiB"

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        super().__init__(rank, size)
        with socket.create_server(("", FIRST_PORT + rank)) as listening:
            (folder / f"stream{rank}").write_text("here")
            while not all((folder / f"stream{other}").exists() for other in range(size)):
                pass
            addresses = os.environ["STREAM_ADDRESSES"].split(",")
            self._to = socket.create_connection((addresses[self.next], FIRST_PORT + self.next))
            self._from, _ = listening.accept()

    def allreduce(self, array: Array) -> Call:
        out = memoryview(np.ones_like(array)).cast("B")
        into = memoryview(np.empty_like(array)).cast("B")

        def send() -> None:
            for begin in range(0, len(out), PIECE):
                self._to.sendall(out[begin : begin + PIECE])

        def call() -> None:
            sending = threading.Thread(target=send)
            sending.start()
            received = 0
            while received < len(into):
                received += self._from.recv_into(into[received : received + PIECE])
            sending.join()

        return call


def make_peer(who: str, folder: Path) -> Peer:
    if who == "mpi":
        return OpenMPI()
    if who == "sirtaki":
        return started_sirtaki()
    rank, size = int(os.environ["SIRTAKI_RANK"]), int(os.environ["SIRTAKI_SIZE"])
    if who == "gloo":
        return TorchDistributed("gloo", rank, size, folder)
    return Stream(rank, size, folder)


def started_sirtaki() -> Peer:
    import sirtaki.numpy as hvd

    hvd.init()
    return Sirtaki("numpy", hvd.rank(), hvd.size())


def main() -> None:
    path, who = sys.argv[1:]
    peer = make_peer(who, Path(path).parent)
    gc.disable()
    serve(path, peer.rank, Rank({who: peer}, None))


if __name__ == "__main__":
    main()
