"""A worker's connection to hvdrun's arbiter: messages in both directions, read by a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from sirtaki.runner.rendezvous.elastic.messages import TO_WORKERS, Message, pack, unpack
from sirtaki.runner.rendezvous.job import RendezvousError, RendezvousTimeout
from sirtaki.runner.rendezvous.rendezvous_client import RendezvousClient

# Seconds for a message, in both directions, because they share the socket's time limit. It is the longest
# that poll(2) takes: the arbiter has deadlines for everything that a worker waits for.
_PATIENCE = 2e6


class ArbiterConnection:
    """A connection to the arbiter. `on_message` and `on_end` are called from the reading thread."""

    def __init__(
        self,
        client: RendezvousClient,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._client = client
        self._on_message = on_message
        self._on_end = on_end
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="sirtaki elastic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Sends a message; any thread may. Raises RendezvousError if the arbiter is gone."""
        with self._sending:
            self._client.send_message(pack(message), time.monotonic() + _PATIENCE)

    def close(self) -> None:
        """Closes this process's end."""
        self._client.close()

    def _read(self) -> None:
        try:
            while True:
                with contextlib.suppress(RendezvousTimeout):  # nothing has happened for that long
                    payload = self._client.receive_message(time.monotonic() + _PATIENCE)
                    self._on_message(unpack(payload, TO_WORKERS))
        except (OSError, ValueError, RendezvousError) as error:  # ValueError: closed by this process's end
            self._on_end(str(error))
