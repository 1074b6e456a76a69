"""Writes the packets of a network interface to a file, until it is ended: python sniff.py INTERFACE FILE."""

from __future__ import annotations

import socket
import sys

_ALL_PROTOCOLS = 3  # ETH_P_ALL (packet(7))


def main() -> None:
    interface, file = sys.argv[1:]
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        wire.bind((interface, 0))
        print("listening", flush=True)
        with open(file, "wb", buffering=0) as seen:
            while True:
                seen.write(wire.recv(1 << 17))


main()
