"""Something between two hosts that cuts connections, and loses what it has taken before."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.connection.address import split_address

UP, DOWN = 0, 1  # from who has connected, and to it
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: an end without a goodbye of TCP


class MiddleBox:
    """Passes the bytes of TCP connections on to `address`, from its own `address`."""

    def __init__(self, address: str) -> None:
        self._target = split_address(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._loses = [False, False]
        self.lost = [0, 0]  # bytes, by direction
        self.connections = 0  # so far
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, direction: int, loses: bool = True) -> None:
        """Loses all further bytes in a direction: their sender believes that they have arrived."""
        with self._changed:
            self._loses[direction] = loses

    def wait_for_loss(self, direction: int, count: int = 1) -> None:
        """Waits until so many bytes have been lost."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.lost[direction] >= count, FAILSAFE_SECONDS)

    def wait_for_connections(self, count: int) -> None:
        """Waits until so many connections have been made in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.connections >= count, FAILSAFE_SECONDS)

    def cut(self, resets: bool = False) -> None:
        """Ends all connections, and loses what it has taken from them; those that follow lose nothing."""
        with self._changed:
            self._loses = [False, False]
            cut, self._open = self._open, []
        for one in cut:
            with contextlib.suppress(OSError):
                if resets:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                one.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Accepts no connection any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self.refuse()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                below, _ = self._listener.accept()
                above = socket.create_connection(self._target, timeout=FAILSAFE_SECONDS)
                with self._changed:
                    self._open += [below, above]
                    self.connections += 1
                    self._changed.notify_all()
                for direction, ends in ((UP, (below, above)), (DOWN, (above, below))):
                    threading.Thread(target=self._pass_on, args=(direction, *ends), daemon=True).start()

    def _pass_on(self, direction: int, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 * 1024):
                with self._changed:
                    loses = self._loses[direction] or source not in self._open
                    self.lost[direction] += loses * len(data)
                    self._changed.notify_all()
                if not loses:
                    target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
